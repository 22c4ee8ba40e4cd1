"""What the steps of a run amounted to: losses and times, read from the device as seldom as possible."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from allstep.report.record import StepRecord
from allstep.trainer.state import TrainerState

__all__ = ["Meter", "StepResult"]

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
    """

    def __init__(self, show: Callable[[StepRecord], None] | None) -> None:
        self._show = show
        self._unread: list[StepResult] = []
        self._samples = 0  # since the last record
        self._since = time.perf_counter()  # of the last record, moved on by pauses

    def add(self, result: StepResult, samples: int, state: TrainerState) -> None:
        """Take in a step over `samples` samples, all ranks together."""
        self._unread.append(result)
        if len(self._unread) >= MOST_UNREAD:  # a run that never logs must not fill the memory
            self.settle(state)
        self._samples += samples
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
            state.interval.add(loss, weight)
            state.run.add(loss, weight)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no training time."""
        began = time.perf_counter()
        try:
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
