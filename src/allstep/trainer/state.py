"""What a training run knows of itself: `TrainerState` (saved with each checkpoint) and `TrainerControl` (wishes for now)."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from allstep.data.position import DataPosition

__all__ = ["ExportableState", "LossSums", "TrainerControl", "TrainerState", "exported_states"]

_OURS = "allstep"
"""Where `stateful_callbacks` keeps what Hugging Face's TrainerState has no field for, and would not load."""
_Exportable = TypeVar("_Exportable", bound="ExportableState")


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


class ExportableState:
    """A callback whose state is saved with each checkpoint. Subclasses have a method `state`."""

    def state(self) -> dict[str, Any]:
        """What makes the object anew: {"args": keywords of its class, "attributes": what is set afterwards}, plain values."""
        raise NotImplementedError(f"{type(self).__name__} is an ExportableState without a method `state`.")

    @classmethod
    def from_state(cls: type[_Exportable], state: Mapping[str, Any]) -> _Exportable:
        """An object as it was when `state` gave `state`."""
        made = cls(**state.get("args", {}))
        for name, value in state.get("attributes", {}).items():
            setattr(made, name, value)
        return made


def exported_states(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Name of class -> what `state` gave; a list where several are of a class. Callbacks that export nothing are left out."""
    states: dict[str, Any] = {}
    for callback in callbacks:
        if callable(getattr(callback, "state", None)) and callable(getattr(callback, "from_state", None)):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: each[0] if len(each) == 1 else each for name, each in states.items()}


@dataclass
class TrainerState:
    """Where a run stands. Fields are Hugging Face's, which can also load the JSON, and a few more behind them."""

    epoch: float = 0.0
    """Passes over the data, in fractions."""
    global_step: int = 0
    """Optimizer steps taken."""
    max_steps: int = 0
    """Optimizer steps of the whole run."""
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    """Samples of one micro-batch."""
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    """Tokens of all ranks up to the last log or checkpoint, where `include_num_input_tokens_seen` asks for them; else 0."""
    total_flos: float = 0.0
    """Floating-point operations of the model, forward and backward on all ranks, up to the last log or checkpoint."""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """Every dictionary that was logged, with its step; complete on every rank."""
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: Any = None
    """Name of class -> state of the callbacks that export one, as of the last checkpoint; made from a list of callbacks."""

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

    def __post_init__(self) -> None:
        given = self.stateful_callbacks
        self.stateful_callbacks = given if isinstance(given, dict) else exported_states(given or ())

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it; floats come back bit for bit."""
        values = dataclasses.asdict(self)
        own = {name: values.pop(name) for name in _OWN_FIELDS}
        values["stateful_callbacks"][_OURS] = {"args": {}, "attributes": own}
        return values

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "TrainerState":
        """The state that `to_dict` gave, or Hugging Face's; keys that are not known here are passed over."""
        states = dict(saved.get("stateful_callbacks") or {})
        found = dict(saved) | states.pop(_OURS, {}).get("attributes", {}) | {"stateful_callbacks": states}
        values = {each.name: found[each.name] for each in dataclasses.fields(cls) if each.name in found}
        for name in ("interval", "run"):
            values[name] = LossSums(**values.get(name, {}))
        if values.get("position"):
            values["position"] = DataPosition(**values["position"])
        values["log_history"] = list(values.get("log_history") or [])
        return cls(**values)

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        """Write `to_dict` as JSON."""
        Path(json_path).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> "TrainerState":
        """Read what `save_to_json` wrote, here or in Hugging Face's class."""
        return cls.from_dict(json.loads(Path(json_path).read_text(encoding="utf-8")))


_OWN_FIELDS = ("skipped_steps", "world_size", "global_batch_size", "position", "interval", "run")
"""Fields that Hugging Face's TrainerState does not have (tests/unit/test_trainer_state.py)."""


@dataclass
class TrainerControl(ExportableState):
    """What should happen next; callbacks set these, the loop obeys and clears them."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def state(self) -> dict[str, Any]:
        """The flags, as other callbacks give their state."""
        return {"args": dataclasses.asdict(self), "attributes": {}}

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = self.should_evaluate = self.should_log = False
