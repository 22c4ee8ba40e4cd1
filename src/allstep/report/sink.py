"""The interface of all places where numbers go."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from allstep.report.record import StepRecord

__all__ = ["Sink"]


class Sink(ABC):
    """One place where numbers go. Calls come in this order: `open`, then any of `step`, `log` and `message`, then `close`.

    `log` and `message` also come outside, where somebody evaluates without training. After `close` it may be opened again.
    """

    @abstractmethod
    def open(self, total_steps: int | None, first_step: int) -> None:
        """Training begins. `total_steps` is the number of the last step, if known; `first_step` of them are done already."""

    @abstractmethod
    def step(self, record: StepRecord) -> None:
        """An optimizer step is done. Not every step needs to come: a record counts what was since the one before."""

    @abstractmethod
    def log(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        """Named values at a step: the means of a logging interval, or the results of an evaluation."""

    @abstractmethod
    def message(self, text: str) -> None:
        """One line for the person who watches."""

    @abstractmethod
    def close(self) -> None:
        """Training has ended, be it by an error."""
