"""The interface of all places where numbers go, and what they are told of the run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from allstep.report.record import StepRecord

__all__ = ["RunFacts", "Sink"]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a tracker shows of a run beside its numbers."""

    name: str | None = None
    """`run_name`; None leaves it to the tracker."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Training arguments by name, plain values."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The model's configuration, where it has one."""
    parameters: int | None = None
    """Numbers in the model that are trained or frozen."""

    @classmethod
    def of(cls, args: Any, model: Any) -> "RunFacts":
        """The facts about a run of `model` with the TrainingArguments `args`."""
        config: Any = getattr(model, "config", None)
        config = config.to_dict() if hasattr(config, "to_dict") else config
        return cls(
            name=args.run_name,
            arguments=args.to_dict(),
            model=dict(config) if isinstance(config, Mapping) else {},
            parameters=None if model is None else sum(each.numel() for each in model.parameters()),
        )

    @property
    def config(self) -> dict[str, Any]:
        """All of it in one dictionary; where model and arguments have a name in common, the argument stands."""
        count = {} if self.parameters is None else {"model/num_parameters": self.parameters}
        return {**self.model, **self.arguments, **count}


class Sink(ABC):
    """One place where numbers go. Calls come in this order: `open`, then any of `step`, `log` and `message`, then `close`.

    `log` and `message` also come outside, where somebody evaluates without training. After `close` it may be opened again.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """What a call may raise for reasons that are not ours: training goes on without the sink."""

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
