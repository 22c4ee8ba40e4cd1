"""A run that is asked to stop: SIGTERM or SIGUSR1 on any rank, one step that all agree on, one complete checkpoint.

And a run that goes on because its launcher started it again.

The launcher learns of it by the rank's stop file: first that the signal was heard, then how far the run came.
"""

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from allstep.checkpoint.store import step_of
from allstep.launch.variables import STOP_FILE
from allstep.trainer.loop import save
from allstep.trainer.run import Run
from allstep.trainer.saving import Saver

__all__ = ["EXIT_CODE", "StopRequest", "restarts", "stop"]

EXIT_CODE = 128 + signal.SIGTERM
"""Of every rank of a run that stopped on request, whatever the signal was."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """While open, SIGTERM and SIGUSR1 are noted instead of ending the process. Handlers of the user's own stay in place."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first that came; None where none did."""
        self.is_heeded = False
        """Whether the run has stopped because of it."""
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if self.signal is not None and not self.is_heeded and kind is None:
            signal.raise_signal(self.signal)  # it came behind the last agreement

    def is_asked(self) -> bool:
        """Whether one has come."""
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
            _tell_launcher({"signal": number})


def restarts() -> int:
    """How often the launcher has started this job again, by the variables of `allstep launch` or torchrun."""
    return int(os.environ.get("ALLSTEP_RESTART_COUNT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def stop(run: Run, saver: Saver, request: StopRequest, say: Callable[[str], None]) -> NoReturn:
    """Collective, behind the loop of a run that was asked to stop: see that all is saved, say so, and leave.

    Raises:
        SystemExit: always, with `EXIT_CODE`: what a script does with a trained model is not to be done now.
    """
    request.is_heeded = True
    if saver.newest is None or step_of(saver.newest) != run.callbacks.state.global_step:
        save(run, saver)
    saver.finish()
    if (words := saver.last_words()) is not None:
        say(words)
    say(_announcement(run, request, saver.newest))
    raise SystemExit(EXIT_CODE)


def _announcement(run: Run, request: StopRequest, checkpoint: Path | None) -> str:
    """Collective. Tell the launcher where the run stopped, and give a line that tells a person."""
    heard = run.communicator.all_gather_object(request.signal)
    rank, number = next(((rank, number) for rank, number in enumerate(heard) if number is not None), (0, signal.SIGTERM))
    step, everywhere = run.callbacks.state.global_step, None not in heard
    to = None if everywhere else rank
    _tell_launcher({"signal": number, "rank": to, "step": step, "checkpoint": checkpoint and str(checkpoint)})
    where = "" if everywhere else f" (sent to rank {rank})"
    saved = f"go on from {checkpoint} with resume_from_checkpoint" if checkpoint else "no checkpoint could be written"
    return f"stopped by {signal.Signals(number).name}{where} after step {step} of {run.plan.max_steps}; {saved}"


def _tell_launcher(said: dict[str, Any]) -> None:
    path = os.environ.get(STOP_FILE)
    if path:
        with suppress(OSError):  # it is only told of what happens anyway
            aside = f"{path}.{os.getpid()}"
            with open(aside, "w", encoding="utf-8") as file:
                json.dump(said, file)
            os.replace(aside, path)
