"""What the steps of a run amounted to: losses and times, read from the device as seldom as possible."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from allstep.arguments import TrainingArguments
from allstep.comm.communicator import Communicator
from allstep.report.record import StepRecord
from allstep.trainer.state import TrainerState
from allstep.trainer.throughput import Speedometer, Work, device_peak

__all__ = ["Meter", "StepResult", "make_meter"]

SHOW_EVERY = 0.1
"""Seconds between two records for whoever watches."""
MOST_UNREAD = 1000
"""Steps after which their results are read, if nobody asked before."""


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind, equal on every rank; tensors are 0-dim and not read yet, so that no device is waited for."""

    loss_sum: torch.Tensor
    """Sum over the grid of weight x loss."""
    weight_sum: torch.Tensor
    """Sum over the grid of weights."""
    grad_norm: torch.Tensor | None
    """Norm of all gradients before clipping; None where nothing is clipped."""
    learning_rate: float
    """What the step used."""
    skipped: bool = False
    """Whether the optimizer did not move, because gradients were not finite; then its loss counts nowhere."""


class Meter:
    """Collects the results of steps, and hands a `StepRecord` to `show` now and then.

    Args:
        show: called with a record at most every tenth of a second, and only on ranks where somebody watches; None for nobody.
        speed: what measures how fast all ranks go; None where nobody asks for `logs`.
        only_finite: whether steps whose loss is not finite are left out of the means.
    """

    def __init__(
        self,
        show: Callable[[StepRecord], None] | None,
        speed: Speedometer | None = None,
        *,
        only_finite: bool = False,
    ) -> None:
        self._show, self._speed, self._only_finite = show, speed, only_finite
        self._unread: list[StepResult] = []
        self._unlogged = 0  # samples since the last log
        self.has_news = False
        """Whether steps since the last log have a loss, be it not finite; known once they are settled."""
        self._samples = 0  # since the last record
        self._since = time.perf_counter()  # of the last record, moved on by pauses

    def begin(self) -> None:
        """Training begins now."""
        self._since = time.perf_counter()
        if self._speed is not None:
            self._speed.begin()

    def count(self, inputs: Any) -> None:
        """This rank runs a micro-batch."""
        if self._speed is not None:
            self._speed.work.add(inputs)

    def add(self, result: StepResult, samples: int, state: TrainerState) -> None:
        """Take in a step over `samples` samples, all ranks together."""
        self._unread.append(result)
        if len(self._unread) >= MOST_UNREAD:  # a run that never logs must not fill the memory
            self.settle(state)
        self._samples += samples
        self._unlogged += samples
        seconds = time.perf_counter() - self._since
        if self._show is not None and (seconds >= SHOW_EVERY or state.global_step == state.max_steps):
            self._show(self._record(result, seconds, state))
            self._since += seconds
            self._samples = 0

    def settle(self, state: TrainerState) -> None:
        """Bring `state.interval` and `state.run` up to date; waits for the device."""
        if not self._unread:
            return
        counted = [each for each in self._unread if not each.skipped]
        self._unread.clear()
        if not counted:
            return
        losses = torch.stack([each.loss_sum for each in counted]).tolist()
        weights = torch.stack([each.weight_sum for each in counted]).tolist()
        for loss, weight in zip(losses, weights, strict=True):
            self.has_news |= weight > 0
            if self._only_finite and not math.isfinite(loss):
                continue
            state.interval.add(loss, weight)
            state.run.add(loss, weight)

    def gather(self, state: TrainerState) -> None:
        """Collective. Bring the counts of all ranks in `state` up to date: tokens and floating-point operations."""
        if self._speed is not None:
            self._speed.gather(state)

    def logs(self, state: TrainerState) -> dict[str, float]:
        """Collective. How fast all ranks went since the last log; see `Speedometer.logs`."""
        samples, self._unlogged, self.has_news = self._unlogged, 0, False
        return {} if self._speed is None else self._speed.logs(samples, state)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no training time."""
        began = time.perf_counter()
        try:
            with nullcontext() if self._speed is None else self._speed.paused():
                yield
        finally:
            self._since += time.perf_counter() - began

    def _record(self, result: StepResult, seconds: float, state: TrainerState) -> StepRecord:
        loss, weight = float(result.loss_sum), float(result.weight_sum)
        return StepRecord(
            step=state.global_step,
            epoch=state.epoch,
            loss=loss / weight if weight else float("nan"),
            weight=weight,
            learning_rate=result.learning_rate,
            grad_norm=None if result.grad_norm is None else float(result.grad_norm),
            samples=self._samples,
            seconds=seconds,
        )


def make_meter(
    args: TrainingArguments,
    model: torch.nn.Module,
    communicator: Communicator,
    device: torch.device,
    processing_class: Any,
    show: Callable[[StepRecord], None] | None,
    flops: Callable[[Any], float],
) -> Meter:
    """The meter of a run of `model`; see `Meter` for `show`, `Work` for `flops`."""
    work = Work(
        model,
        str(args.include_num_input_tokens_seen),
        padding=getattr(processing_class, "pad_token_id", None),
        flops=flops,
    )
    speed = Speedometer(work, communicator, device, device_peak(device, bf16=args.bf16, fp16=args.fp16))
    return Meter(show, speed, only_finite=args.logging_nan_inf_filter)
