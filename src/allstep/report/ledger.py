"""The ledger: what each optimizer step was made of, and what it gave, so that two runs can be compared step by step.

Each rank appends to `ledger/rank_{r}.jsonl` in the output folder, a JSON object a line, one line for each step:

    step epoch world_size threads block in_order learning_rate     of the run at that step
    loss weight grad_norm                                          of the whole step, equal on all ranks
    micro_batches                                                  of this rank: number in the grid, samples, weight, loss
    gradients parameters buffers                                   name -> digest, in steps that digests are due
    rows                                                           of each micro-batch, where inputs are looked at: by sample

Numbers are written so that they come back bit for bit. Samples are indices into the dataset, in the order of the epoch.
"""

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from allstep.comm.agreement import digest
from allstep.report.record import json_line

__all__ = ["LEDGER_FOLDER", "Ledger", "LedgerStep", "MicroBatchLine", "cut_ledger", "read_ledger", "samples_by_epoch"]

LEDGER_FOLDER = "ledger"
"""Name of the ledger's folder inside the output folder."""

_MOST_UNREAD = 16
"""Steps whose numbers may still be on a device; reading them waits for it."""
_DIGITS = 16
"""Hexadecimal digits of a digest."""


@dataclass(kw_only=True)
class MicroBatchLine:
    """What the ledger says of one micro-batch."""

    number: int
    """Its place in the grid."""
    samples: list[int]
    """Indices into the dataset."""
    weight: float
    """What its mean loss was taken over."""
    loss: float | None
    """Its mean loss; None where no label of it counts."""
    rows: list[str] = field(default_factory=list)
    """A digest for each sample, of what the model was given; empty where inputs were not looked at."""


@dataclass(kw_only=True)
class LedgerStep:
    """What the ledger says of one optimizer step; as read, of all ranks together."""

    step: int
    epoch: int
    """Epoch of its samples, counted from 0."""
    world_size: int
    threads: int
    """CPU threads of each rank."""
    block: int
    """Places of the grid that each rank has; a micro-batch without samples is a place too."""
    in_order: bool
    """Whether gradients were summed in an order that does not depend on the number of ranks."""
    learning_rate: float
    loss: float
    """Mean loss of the global batch."""
    weight: float
    """What that mean was taken over."""
    grad_norm: float | None
    micro_batches: list[MicroBatchLine]
    """In grid order."""
    gradients: dict[str, str] = field(default_factory=dict)
    """Name -> digest, before clipping; empty where it was not due."""
    parameters: dict[str, str] = field(default_factory=dict)
    """The same, of parameters after the step."""
    buffers: dict[str, str] = field(default_factory=dict)
    """The same, of buffers."""
    ranks_differ: list[str] = field(default_factory=list)
    """What the ranks' lines do not agree on that has to be equal on all; empty in a line as it was written."""


class Ledger:
    """Writes this rank's lines. A full disk ends the ledger with one warning, not the training.

    Args:
        folder: the ledger's, which is there.
        rank: this one.
        facts: world_size, threads, block and in_order.
        digest_steps: digests are taken every so many steps; 0: never.
        with_rows: look at the inputs of every micro-batch too.
    """

    def __init__(
        self, folder: Path, rank: int, facts: Mapping[str, Any], *, digest_steps: int = 0, with_rows: bool = False
    ) -> None:
        self._path, self._facts, self._digest_steps, self._with_rows = (
            folder / f"rank_{rank}.jsonl",
            facts,
            digest_steps,
            with_rows,
        )
        self._file: TextIO | None = self._path.open("a", encoding="utf-8")
        self._lines: list[dict[str, Any]] = []  # with tensors that were not read yet
        self._micro_batches: list[dict[str, Any]] = []
        self._digests: dict[str, dict[str, str]] = {}

    def note(self, number: int, samples: list[int], weight: float, loss: torch.Tensor | None, inputs: Any) -> None:
        """A micro-batch of the step that runs; `loss` is 0-dim and is not read yet."""
        line = {"number": number, "samples": samples, "weight": weight, "loss": loss}
        self._micro_batches.append({**line, "rows": _rows(inputs, len(samples))} if self._with_rows else line)

    def is_due(self, step: int) -> bool:
        """Whether digests are taken in a step."""
        return bool(self._digest_steps) and step % self._digest_steps == 0

    def note_tensors(self, kind: str, named: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Take digests of "gradients", "parameters" or "buffers"."""
        self._digests[kind] = {name: _short([("", tensor)]) for name, tensor in named if tensor is not None}

    def end_step(self, step: int, epoch: int, **numbers: Any) -> None:
        """The step is done; `numbers` are its loss, weight, grad_norm (0-dim tensors, not read yet) and learning_rate."""
        line = {"step": step, "epoch": epoch, **self._facts, **numbers, "micro_batches": self._micro_batches}
        self._lines.append({**line, **self._digests})
        self._micro_batches, self._digests = [], {}
        if len(self._lines) >= _MOST_UNREAD:
            self.settle()

    def settle(self) -> None:
        """Write what was noted; waits for the device."""
        lines, self._lines = self._lines, []
        if self._file is None or not lines:
            return
        try:
            self._file.writelines(json_line(_read(line)) + "\n" for line in lines)
            self._file.flush()
        except OSError as error:
            warnings.warn(f"{self._path} ends here: {error}. Training goes on.", stacklevel=2)
            self._file = None

    def close(self) -> None:
        """Write what was noted, and close the file."""
        self.settle()
        if self._file is not None:
            self._file.close()
            self._file = None


def cut_ledger(folder: Path, last_step: int) -> None:
    """Make the folder, and drop the lines of all ranks beyond `last_step`: those steps will be done again.

    A run from the beginning (0) keeps the ledger of another run that it finds as `ledger.previous`.
    """
    if last_step == 0 and folder.exists():
        before = folder.with_name(f"{folder.name}.previous")
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("rank_*.jsonl"):
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= last_step]
        if not kept:
            path.unlink()
            continue
        beside = path.with_name(f"{path.name}.new")
        beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        beside.replace(path)


def read_ledger(folder: Path) -> dict[int, LedgerStep]:
    """Step -> what all ranks say of it, micro-batches in grid order. Steps that a rank has not written are left out.

    Raises:
        FileNotFoundError: there is no ledger.
    """
    paths = sorted(folder.glob("rank_*.jsonl"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no ledger: no rank_0.jsonl. Train with ledger=True.")
    said: dict[int, list[dict[str, Any]]] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            if _step_of(line) < _TORN:
                values = json.loads(line)
                said.setdefault(values["step"], []).append(values)
    return {step: _merged(lines) for step, lines in sorted(said.items()) if len(lines) == lines[0]["world_size"]}


def samples_by_epoch(steps: Iterable[LedgerStep]) -> dict[int, Counter[int]]:
    """Epoch -> how often each sample was used in it."""
    used: dict[int, Counter[int]] = {}
    for step in steps:
        for micro_batch in step.micro_batches:
            used.setdefault(step.epoch, Counter()).update(micro_batch.samples)
    return used


_TORN = 1 << 62


def _step_of(line: str) -> int:
    """The step of a line; of one that was cut off in the middle, later than any."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return _TORN


def _merged(lines: Sequence[dict[str, Any]]) -> LedgerStep:
    first = lines[0]
    shared = [name for name in first if name != "micro_batches"]
    # buffers may differ between reductions: all go on with rank 0's
    differ = [name for name in shared if name != "buffers" and any(line.get(name) != first[name] for line in lines)]
    micro_batches = [MicroBatchLine(**_numbers(each)) for line in lines for each in line["micro_batches"]]
    values = {name: first[name] for name in shared}
    return LedgerStep(
        **_numbers(values), micro_batches=sorted(micro_batches, key=lambda each: each.number), ranks_differ=differ
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that JSON does not have were written as text."""
    return {
        name: float(value) if name in ("loss", "weight", "grad_norm") and value is not None else value
        for name, value in values.items()
    }


def _read(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, dict):
        return {key: _read(item) for key, item in value.items()}
    return [_read(item) for item in value] if isinstance(value, list) else value


def _rows(inputs: Any, count: int) -> list[str]:
    """A digest for each sample of a collated batch: of its row in every tensor that has one."""
    named = list(_tensors("", inputs))
    return [
        _short([(name, tensor[row]) for name, tensor in named if tensor.dim() and len(tensor) == count]) for row in range(count)
    ]


def _tensors(name: str, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors(f"{name}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}.{index}", item)


def _short(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    return digest(named)[:_DIGITS]
