"""Faults for tests of training: a rank fails, hangs, is slow, is killed, leaves, computes NaN, loses a bit, has no disk left.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[faults.kill(rank=1, step=7, record="faults.log")])

Each is a callback that acts on one rank in one optimizer step, counted from 1, at one event, and nowhere else. A test has to
see that the fault came: `fired` counts in this process, and a line in `record`, written before the rank acts, outlives it.
"""

import errno
import json
import os
import signal as signals
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allstep.trainer.callbacks.handler import EVENTS, TrainerCallback
from allstep.trainer.stopping import restarts

__all__ = ["Fault", "InjectedError", "fail", "fired", "flip_bit", "full_disk", "hang", "kill", "leave", "nan", "slow"]


class InjectedError(RuntimeError):
    """What `fail` raises where it is given nothing else."""


class Fault(TrainerCallback):
    """Acts at `event` of step `step` on `rank`, and up to `steps` - 1 steps later again.

    Args:
        kind: its name in the record.
        act: what it does, given what the event is told (`model`, `optimizer`, …).
        rank: on which rank.
        step: in which optimizer step, from 1.
        event: at which event of the callbacks. Events behind the step ("on_step_end", "on_save", …) belong to the step done.
        steps: over how many steps; None: to the end.
        record: file to which a line of JSON is added each time, before it acts.
        restart: only in this generation of a job that is restarted; 0 is the first.
    """

    decides_alike = True

    def __init__(
        self,
        kind: str,
        act: Callable[..., None],
        *,
        rank: int,
        step: int,
        event: str = "on_step_begin",
        steps: int | None = 1,
        record: str | os.PathLike[str] | None = None,
        restart: int = 0,
    ) -> None:
        if event not in EVENTS:
            raise ValueError(f"{kind}: event={event!r}; expected one of {', '.join(EVENTS)}.")
        if rank < 0 or step < 1:
            raise ValueError(f"{kind}: rank={rank}, step={step}; ranks count from 0, steps from 1.")
        self.kind, self.rank, self.step = kind, rank, step
        self.fired = 0
        """How often it acted in this process."""
        self._act, self._steps, self._record, self._restart = act, steps, record, restart
        setattr(self, event, self._at_event)
        self._is_behind = event in ("on_step_end", "on_save", "on_log", "on_evaluate", "on_epoch_end", "on_train_end")

    def _at_event(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = state.global_step if self._is_behind else state.global_step + 1
        last = now if self._steps is None else self.step + self._steps - 1
        if not self.step <= now <= last or self.rank != _rank() or self._restart != restarts():
            return
        self.fired += 1
        if self._record is not None:
            line = json.dumps({"fault": self.kind, "rank": self.rank, "step": now, "pid": os.getpid(), "time": time.time()})
            with open(self._record, "a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        self._act(state=state, **kwargs)


def fired(record: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """What faults with this `record` have done: a dict with fault, rank, step, pid and time (unix seconds) each, in order."""
    path = Path(record)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def fail(error: BaseException | None = None, **where: Any) -> Fault:
    """Raise `error`, by default an `InjectedError`."""

    def act(state: Any, **_: Any) -> None:
        raise error if error is not None else InjectedError(f"rank {where['rank']} fails in step {where['step']}, as asked to")

    return Fault("fail", act, **where)


def hang(seconds: float | None = None, **where: Any) -> Fault:
    """Do nothing for `seconds`; None: for ever."""

    def act(**_: Any) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        while end is None or time.monotonic() < end:
            time.sleep(0.05)

    return Fault("hang", act, **where)


def slow(seconds: float, steps: int | None = None, **where: Any) -> Fault:
    """Take `seconds` longer for each of `steps` steps; None: to the end."""
    return Fault("slow", lambda **_: time.sleep(seconds), steps=steps, **where)


def kill(signal: int = signals.SIGKILL, **where: Any) -> Fault:
    """Send `signal` to the rank itself: SIGKILL ends it, SIGSTOP freezes it, SIGTERM asks it to stop."""
    return Fault("kill", lambda **_: os.kill(os.getpid(), signal), **where)


def leave(code: int = 0, **where: Any) -> Fault:
    """End the process at once with an exit code, and without a word."""
    return Fault("leave", lambda **_: os._exit(code), **where)


def nan(parameter: str | None = None, **where: Any) -> Fault:
    """Turn this rank's gradients of one parameter, by default the first, into NaN for the step."""
    _refuse_event("nan", where)
    handles: list[Any] = []

    def act(model: nn.Module, **_: Any) -> None:
        target = _parameter(model, parameter)
        handles.append(target.register_hook(lambda gradient: torch.full_like(gradient, float("nan"))))

    fault = Fault("nan", act, **where)

    def let_go(*_: Any, **__: Any) -> None:
        while handles:
            handles.pop().remove()

    fault.on_step_end = let_go  # type: ignore[method-assign]
    return fault


def flip_bit(parameter: str | None = None, element: int = 0, bit: int = 22, **where: Any) -> Fault:
    """Flip one bit of one number of a parameter, by default of the first; 22 is the highest of a float32's fraction."""

    def act(model: nn.Module, **_: Any) -> None:
        target = _parameter(model, parameter)
        flat = target.detach().as_strided((target.numel(),), (1,))[element : element + 1]  # in the order of its memory
        flat.view(_INTEGERS[flat.element_size()]).bitwise_xor_(1 << bit)

    return Fault("flip_bit", act, **where)


def full_disk(steps: int | None = None, **where: Any) -> Fault:
    """Let no file of this rank reach the disk for `steps` steps, None: to the end; the error is that of a disk that is full."""
    _refuse_event("full_disk", where)
    sync = os.fsync

    def act(**_: Any) -> None:
        os.fsync = _refuse

    fault = Fault("full_disk", act, **where)
    fill = fault.on_step_begin

    def on_step_begin(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if steps is not None and state.global_step + 1 >= fault.step + steps:
            os.fsync = sync
        fill(args, state, control, **kwargs)

    fault.on_step_begin = on_step_begin  # type: ignore[method-assign]
    fault.on_train_end = lambda *_, **__: setattr(os, "fsync", sync)  # type: ignore[method-assign]
    return fault


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _refuse(fd: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _parameter(model: nn.Module, name: str | None) -> nn.Parameter:
    named = dict(model.named_parameters())
    if name is None:
        return next(iter(named.values()))
    if name not in named:
        raise ValueError(f"The model has no parameter {name!r}; it has {', '.join(named)}.")
    return named[name]


def _refuse_event(kind: str, where: dict[str, Any]) -> None:
    if "event" in where:
        raise ValueError(f"{kind}: takes no event; it begins with its step.")


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
