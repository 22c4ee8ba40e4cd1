"""What a training run knows of itself: `TrainerState` (saved with each checkpoint) and `TrainerControl` (wishes for now)."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from allstep.data.position import DataPosition

__all__ = ["LossSums", "TrainerControl", "TrainerState"]


@dataclass
class LossSums:
    """Losses and their weights, summed over ranks and steps; a mean is their quotient."""

    loss: float = 0.0
    weight: float = 0.0

    def add(self, loss: float, weight: float) -> None:
        """Add the sum of weight x loss, and the sum of weights, of one step."""
        self.loss += loss
        self.weight += weight

    def clear(self) -> None:
        """Start anew."""
        self.loss = self.weight = 0.0

    @property
    def mean(self) -> float:
        """The weighted mean loss; NaN before anything was added."""
        return self.loss / self.weight if self.weight else float("nan")


@dataclass
class TrainerState:
    """Where a run stands. Field names and `trainer_state.json` are Hugging Face's, and a few more."""

    epoch: float = 0.0
    """Passes over the data, in fractions."""
    global_step: int = 0
    """Optimizer steps taken."""
    max_steps: int = 0
    """Optimizer steps of the whole run."""
    num_train_epochs: int = 0
    logging_steps: int = 0
    eval_steps: int = 0
    save_steps: int = 0
    train_batch_size: int = 0
    """Samples of one micro-batch."""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """Every dictionary that was logged, with its step; complete on every rank."""
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    skipped_steps: int = 0
    """Steps in which the optimizer did not move, because gradients were not finite; `global_step` counts them too."""
    world_size: int = 1
    """Ranks of the run that wrote this."""
    global_batch_size: int = 0
    """Samples of one optimizer step on all ranks."""
    position: DataPosition | None = None
    """The step to be taken next; None in states that others wrote."""
    interval: LossSums = field(default_factory=LossSums)
    """Since the last log."""
    run: LossSums = field(default_factory=LossSums)
    """Since the start of the run."""

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it; floats come back bit for bit."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "TrainerState":
        """The state that `to_dict` gave; keys that are not known here are passed over (Hugging Face has more)."""
        names = {each.name for each in dataclasses.fields(cls)}
        values = {key: value for key, value in saved.items() if key in names}
        for name in ("interval", "run"):
            values[name] = LossSums(**values.get(name, {}))
        if values.get("position"):
            values["position"] = DataPosition(**values["position"])
        return cls(**values)


@dataclass
class TrainerControl:
    """What should happen next; callbacks set these, the loop obeys and clears them."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
