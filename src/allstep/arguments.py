"""`TrainingArguments`: everything a run can be told, under the names known from Hugging Face, checked once.

Its fields stand in `_arguments.training_fields` and `_arguments.run_fields`, with a sentence under each; its rules in
`_arguments.checks`. Names, defaults and meanings are those of Hugging Face's TrainingArguments unless the sentence says
otherwise; names of its earlier versions work too (`_arguments.old_names`).
"""

import copy
import dataclasses
import json
import math
import os
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any, Literal, TypeVar

from allstep._arguments.checks import normalise, notices, problems
from allstep._arguments.convert import values_of
from allstep._arguments.files import read_arguments_file, read_json, read_yaml
from allstep._arguments.old_names import OLD_NAMES, ArgumentsMeta, warn
from allstep._arguments.setters import SettableArguments
from allstep.errors import ArgumentsError

__all__ = ["TrainingArguments"]

_Arguments = TypeVar("_Arguments", bound="TrainingArguments")


@dataclass
class TrainingArguments(SettableArguments, metaclass=ArgumentsMeta):
    """How to train. Checked when made: every problem found is reported in one message.

    Subclass it as a dataclass, or with an `__init__` of its own, to add arguments. allstep never changes an object that you
    made.

    Raises:
        ArgumentsError: values that cannot hold together.
        TypeError: a name that is not an argument; the message says what to write instead.
    """

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        names = [each.name for each in dataclasses.fields(TrainingArguments)]
        names.remove("local_rank")  # the launcher's word, which is asked for when somebody reads it
        values = normalise({name: getattr(self, name) for name in names})
        found = problems(values)
        if found:
            lines = "".join(f"\n  {problem}" for problem in found)
            raise ArgumentsError(f"{type(self).__name__} cannot hold together:{lines}")
        for name, value in values.items():
            setattr(self, name, value)
        for notice in notices(values):
            warn(notice, UserWarning)

    def __getattr__(self, name: str) -> Any:
        if name not in OLD_NAMES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return OLD_NAMES[name].read(self)

    # ---- derived: sizes, times, steps

    @property
    def train_batch_size(self) -> int:
        """Samples of one micro-batch on one rank."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples of one batch on one rank in evaluation."""
        return self.per_device_eval_batch_size

    @property
    def recompute_activations(self) -> bool:
        """Whether activations are recomputed in backward, under either of the two names."""
        newer, older = self.activation_checkpointing, self.gradient_checkpointing
        return bool(older if newer is None else newer)

    @property
    def recompute_kwargs(self) -> dict[str, Any]:
        """Settings of the recomputation, under either of the two names."""
        newer, older = self.activation_checkpointing_kwargs, self.gradient_checkpointing_kwargs
        return dict((older if newer is None else newer) or {})  # type: ignore[arg-type]  # JSON became a dict when checked

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of warm-up in a run of `num_training_steps` optimizer steps."""
        return _steps(self.warmup_steps, num_training_steps)

    def get_interval(self, event: Literal["logging", "eval", "save"], num_training_steps: int) -> int:
        """Optimizer steps between two events of a kind, in a run of `num_training_steps`; at least 1."""
        every: float | None = getattr(self, f"{event}_steps")
        return max(1, _steps(self.logging_steps if every is None else every, num_training_steps))

    # ---- to and from other forms

    def to_dict(self) -> dict[str, Any]:
        """Every field and its value, copied; enums as their values, and secrets (`..._token`) hidden."""
        return {each.name: _plain(each.name, getattr(self, each.name)) for each in dataclasses.fields(self) if each.init}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """What `to_dict` holds, and the sizes of batches, as numbers and texts that every tracker takes."""
        values = self.to_dict() | {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {name: value if type(value) in (bool, int, float, str) else str(value) for name, value in values.items()}

    def to_json_string(self) -> str:
        """Every field as JSON, in the order in which they are declared."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    @classmethod
    def from_json(cls: type[_Arguments], path_or_text: str | os.PathLike[str]) -> _Arguments:
        """Read arguments from a JSON file, or from JSON text (which begins with a brace).

        Raises:
            ArgumentsError: text that is not a JSON object, or values that cannot hold together.
            TypeError: a name that is not an argument.
        """
        source = os.fspath(path_or_text)
        return cls(**(read_json(source, "The text") if source.lstrip().startswith("{") else read_arguments_file(source)))

    @classmethod
    def from_yaml(cls: type[_Arguments], path_or_text: str | os.PathLike[str]) -> _Arguments:
        """Read arguments from a YAML file, or from YAML text (of several lines, or with ": " in it). Needs PyYAML.

        Raises:
            ArgumentsError: text that is not a YAML mapping, or values that cannot hold together.
            TypeError: a name that is not an argument.
        """
        source = os.fspath(path_or_text)
        is_text = "\n" in source or ": " in source
        return cls(**(read_yaml(source, "The text") if is_text else read_arguments_file(source, kind="YAML")))

    @classmethod
    def from_transformers(cls: type[_Arguments], args: Any) -> _Arguments:
        """The same arguments, from a `transformers.TrainingArguments` of this or an earlier version, or a subclass of it.

        Fields and attributes that a subclass added are there to be read on what is returned.

        Raises:
            ArgumentsError: values that ask for what is not there here, all in one message.
        """
        values, further = values_of(args, [each.name for each in dataclasses.fields(cls) if each.init])
        made = cls(**values)
        for name, value in further.items():
            if not hasattr(cls, name):
                setattr(made, name, value)
        return made


def _steps(number: float, total: int) -> int:
    # Fraction of the digits as written: in floating point a tenth of 30 steps would round up to 4.
    return int(number) if number >= 1 else math.ceil(Fraction(repr(number)) * total)


def _plain(name: str, value: Any) -> Any:
    if name.endswith("_token") and value is not None:
        return f"<{name.upper()}>"
    return value.value if isinstance(value, Enum) else copy.deepcopy(value)
