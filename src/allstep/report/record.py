"""What happened, as values that become JSON and come back: `StepRecord` for an optimizer step, `RunReport` for a run."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from allstep.report.metrics import format_duration, format_number, format_rate

__all__ = ["RunReport", "StepRecord", "json_line"]

_Record = TypeVar("_Record", "StepRecord", "RunReport")
_NOT_FINITE = ("nan", "inf", "-inf")


def json_line(values: Mapping[str, Any]) -> str:
    """One line of JSON that every reader takes.

    JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf", which `float` reads back.
    Numbers of NumPy and torch are written as plain numbers, paths as strings.
    """
    return json.dumps(_plain(values), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one optimizer step did, over all ranks. Counts and seconds are those since the record before."""

    step: int
    """Number of this step; the first of a run is 1."""
    epoch: float
    """Passes over the data done after this step, with fraction."""
    loss: float
    """Mean loss of the global batch, weighted as the gradients were."""
    weight: float
    """What that mean was taken over: valid label tokens where there are any, else samples."""
    learning_rate: float
    """The value this step used, of the first parameter group."""
    grad_norm: float | None = None
    """Norm of all gradients before clipping; None where it was not computed."""
    samples: int
    """Samples seen, on all ranks together."""
    tokens: int | None = None
    """Tokens seen, on all ranks together; None where nobody counts them."""
    seconds: float
    """Wall-clock time on rank 0, without evaluations and saves."""

    def __str__(self) -> str:
        words = [f"step {self.step}", f"loss {format_number(self.loss)}", f"lr {format_number(self.learning_rate)}"]
        if self.grad_norm is not None:
            words.append(f"grad norm {format_number(self.grad_norm)}")
        if self.seconds > 0:
            words.append(format_rate(self.samples / self.seconds, "samples"))
        return "  ".join(words)

    def to_json(self) -> str:
        """One line of JSON; see `json_line`."""
        return json_line(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "StepRecord":
        """Read what `to_json` wrote."""
        return _read(cls, text)


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """How a training run ended."""

    steps: int
    """Optimizer steps done, those before a resume included."""
    first_step: int = 0
    """Steps that had been done before this process began; 0 unless it resumed."""
    epoch: float
    """Passes over the data done, with fraction."""
    samples: int
    """Samples that this process and its peers trained on, since `first_step`."""
    seconds: float
    """Wall-clock time of training since `first_step`, evaluations and saves included."""
    train_loss: float
    """Mean loss of the whole run, steps before a resume included, weighted as the gradients were."""
    world_size: int
    """Number of ranks."""
    digests: tuple[str, ...]
    """SHA-256 of each rank's weights, by rank. Equal digests mean equal bits."""
    output_dir: str
    """Where checkpoints and metrics lie."""

    @property
    def samples_per_second(self) -> float:
        """Over all ranks, since `first_step`; 0.0 for a run without steps."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def replicas_are_identical(self) -> bool:
        """Whether all ranks ended with the same weights, bit for bit."""
        return len(set(self.digests)) <= 1

    def __str__(self) -> str:
        resumed = f", resumed at {self.first_step}" if self.first_step else ""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        lines = [
            f"{self.steps} steps ({self.epoch:.2f} epochs{resumed}) on {ranks} in {format_duration(self.seconds)}, "
            f"{format_rate(self.samples_per_second, 'samples')}, mean loss {format_number(self.train_loss)}",
            *(f"weights of rank {rank}: sha256 {digest[:16]}" for rank, digest in enumerate(self.digests)),
        ]
        if not self.replicas_are_identical:
            lines.append("THE RANKS ENDED WITH DIFFERENT WEIGHTS")
        elif len(self.digests) > 1:
            lines.append("all ranks hold the same weights")
        return "\n".join([*lines, f"output in {self.output_dir}"])

    def to_json(self) -> str:
        """One line of JSON; see `json_line`."""
        return json_line(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RunReport":
        """Read what `to_json` wrote."""
        return _read(cls, text)


def _read(record: type[_Record], text: str) -> _Record:
    content = json.loads(text)
    known = {field.name: field.type for field in fields(record)}
    values = {name: _typed(known[name], value) for name, value in content.items() if name in known}
    return record(**values)


def _typed(kind: Any, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return float(value) if value in _NOT_FINITE and "float" in getattr(kind, "__name__", str(kind)) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # an array or a tensor, be it of a single number
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
