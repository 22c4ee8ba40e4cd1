"""What is in a checkpoint, file by file, under Hugging Face's names.

model.safetensors     the weights, without wrapper prefixes; beside it whatever the model's save_pretrained writes
optimizer.pt          optimizer.state_dict()
scheduler.pt          scheduler.state_dict()
scaler.pt             scaler.state_dict(), in fp16 runs
data.pt               where a stream was, in runs on streams
trainer_state.json    the trainer's own record: step, epoch, position, log history
training_args.json    the arguments of the run
rng_state_{rank}.pth  the generators of one rank; rng_state.pth in a world of one
"""

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from allstep.checkpoint.generators import GeneratorStates
from allstep.checkpoint.names import unwrapped
from allstep.checkpoint.plain_files import copied, read_json, read_plain, write_json, write_plain
from allstep.checkpoint.store import WriteFiles
from allstep.checkpoint.weights import (
    WEIGHTS_FILE,
    copied_weights,
    read_weights,
    restore_weights,
    write_pretrained,
    write_weights,
    writes_itself,
)
from allstep.errors import CheckpointError

__all__ = [
    "ReadState",
    "Stateful",
    "TrainState",
    "copied_files",
    "live_files",
    "model_files",
    "read_state",
    "restore_state",
    "rng_file",
]

_ARGUMENTS_FILE = "training_args.json"
_STATE_FILE = "trainer_state.json"
_STATEFUL = ("optimizer", "scheduler", "scaler", "data")
_OPTIONAL = ("scaler", "data")
_GENERATORS = ("python", "numpy", "cpu")
_Write = Callable[[Any, Path], None]


class Stateful(Protocol):
    """An optimizer, a schedule, a scaler, a stream: what gives its state and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The live objects of a run. A save reads them; a load fills the same ones."""

    model: nn.Module
    """The model, wrapped or not."""
    optimizer: Stateful | None = None
    """None: no optimizer.pt."""
    scheduler: Stateful | None = None
    """None: no scheduler.pt."""
    scaler: Stateful | None = None
    """The gradient scaler of an fp16 run. None: no scaler.pt."""
    data: Stateful | None = None
    """The stream of a run. None: no data.pt. Folders that others wrote have none either."""
    processing_class: Any = None
    """A tokenizer or the like, whose `save_pretrained` adds its files. Not read back."""
    trainer_state: Mapping[str, Any] = field(default_factory=dict)
    """Values for trainer_state.json. A load hands them back and does not change these."""
    training_args: Mapping[str, Any] = field(default_factory=dict)
    """Values for training_args.json."""
    write_model: Callable[[Path], object] | None = None
    """The user's way to write the model, and whatever else belongs to it, into a folder. None: as allstep writes models."""
    writes_together: bool = False
    """`write_model` is called on every rank, as it may talk to the others; what ranks but 0 write is thrown away."""
    with_generators: bool = True
    """False: no rng_state files, in runs that save the model only."""


@dataclass(frozen=True, kw_only=True)
class ReadState:
    """All that one rank reads from a checkpoint, before any of it is put into the live objects."""

    weights: Mapping[str, Any]
    """Tensors by name."""
    stateful: Mapping[str, Any]
    """State of optimizer, scheduler, scaler and data, as far as the run has them."""
    trainer_state: dict[str, Any]
    """What was in trainer_state.json."""
    training_args: dict[str, Any]
    """What was in training_args.json; empty where there was none, as in Hugging Face's own folders."""
    generators: GeneratorStates | None
    """This rank's generators; None where there is no file for them."""


def rng_file(rank: int, world_size: int) -> str:
    """Name of the file with the generators of `rank`."""
    return "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"


def model_files(state: TrainState) -> dict[str, WriteFiles]:
    """How to write the model and its tokenizer, by the name of what is written."""
    files: dict[str, WriteFiles] = {WEIGHTS_FILE: lambda folder: write_weights(state.model, folder, by=state.write_model)}
    if state.write_model is None and writes_itself(state.processing_class):
        files["processing_class"] = lambda folder: write_pretrained(state.processing_class, folder)
    return files


def _model_files_of(state: TrainState, rank: int) -> dict[str, WriteFiles]:
    if rank == 0:
        return model_files(state)
    write_model = state.write_model
    if write_model is None or not state.writes_together:
        return {}

    def call_aside(folder: Path) -> list[str]:
        with tempfile.TemporaryDirectory() as aside:
            write_model(Path(aside))
        return []

    return {WEIGHTS_FILE: call_aside}


def live_files(state: TrainState, rank: int, world_size: int) -> dict[str, WriteFiles]:
    """How to write the files of `rank`, by the name of what is written; nothing is read or written yet.

    Rank 0 has those that a checkpoint has once, and each rank its generators.
    """
    files = {name: _file(name, write, value) for name, (write, value) in _parts(state, rank, world_size).items()}
    return _model_files_of(state, rank) | files


def copied_files(state: TrainState, rank: int, world_size: int, folder: Path) -> dict[str, WriteFiles]:
    """How to write the same files into `folder` from copies that are made now: at any later time, and beside training.

    Where a model or tokenizer has a `save_pretrained` of its own, it is called now, as it may look at anything.
    """
    files: dict[str, WriteFiles] = {}
    for label, write in _model_files_of(state, rank).items():
        if label == WEIGHTS_FILE and state.write_model is None and not writes_itself(unwrapped(state.model)):
            files[label] = copied_weights(state.model)
        else:
            files[label] = _written_already(write(folder))
    for name, (write_value, value) in _parts(state, rank, world_size).items():
        files[name] = _file(name, write_value, functools.partial(_given, copied(value())))
    return files


def read_state(folder: Path, state: TrainState, rank: int, world_size: int) -> ReadState:
    """Read from `folder` what `state` has a place for. The live objects stay as they are.

    Raises:
        CheckpointError: a file is missing, is damaged, or could run code if it were read.
    """
    arguments = read_json(folder / _ARGUMENTS_FILE) if (folder / _ARGUMENTS_FILE).exists() else {}
    generators = folder / rng_file(rank, world_size)
    return ReadState(
        weights=read_weights(folder),
        stateful={
            part: read_plain(folder / f"{part}.pt")
            for part in _STATEFUL
            if getattr(state, part) is not None and (part not in _OPTIONAL or (folder / f"{part}.pt").exists())
        },
        trainer_state=read_json(folder / _STATE_FILE),
        training_args=arguments,
        generators=_read_generators(generators) if state.with_generators and generators.exists() else None,
    )


def restore_state(read: ReadState, state: TrainState, source: Path) -> str | None:
    """Put what was read from the folder `source` into the live objects, except the generators.

    The result is a line for the person who watches, where names of weights were not quite the model's; see `restore_weights`.

    Raises:
        CheckpointError: something does not fit; the message names it. The live objects are then of no more use.
    """
    line = restore_weights(state.model, read.weights, source)
    for part, saved in read.stateful.items():
        live = getattr(state, part)
        try:
            if isinstance(live, torch.optim.Optimizer):
                _restore_optimizer(live, saved)
            else:
                live.load_state_dict(saved)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{part}.pt in {source} does not fit this run's {type(live).__name__}: {error}. Build the same {part}, over "
                f"the same parameters in the same order, as the run that wrote it."
            ) from error
    return line


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore bit for bit: torch alone casts each state tensor to its parameter's dtype, so that fp32 moments of a bf16
    parameter lose 16 bits, and it leaves tensors in the groups (a learning rate, say) on the CPU. See test_state.py."""
    placed = [{key: v.device for key, v in group.items() if isinstance(v, Tensor)} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, devices in zip(optimizer.param_groups, placed, strict=True):
        for key, device in devices.items():
            if isinstance(group[key], Tensor):
                group[key] = group[key].to(device)
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for key, value in saved["state"].get(index, {}).items():
            own = optimizer.state[parameter]  # not for parameters without state: asking would give them an empty one
            if isinstance(value, Tensor) and isinstance(own.get(key), Tensor) and own[key].dtype != value.dtype:
                own[key] = value.to(own[key].device)


def _parts(state: TrainState, rank: int, world_size: int) -> dict[str, tuple[_Write, Callable[[], Any]]]:
    """By name, each file of `rank` that we write ourselves, the weights left out: how it is written, and what is in it."""
    parts: dict[str, tuple[_Write, Callable[[], Any]]] = {}
    if rank == 0:
        for part in _STATEFUL:
            if getattr(state, part) is not None:
                parts[f"{part}.pt"] = write_plain, getattr(state, part).state_dict
        parts[_STATE_FILE] = write_json, lambda: state.trainer_state
        parts[_ARGUMENTS_FILE] = write_json, lambda: state.training_args
    if state.with_generators:
        parts[rng_file(rank, world_size)] = write_plain, lambda: dict(GeneratorStates.capture().states)
    return parts


def _file(name: str, write: _Write, value: Callable[[], Any]) -> WriteFiles:
    def write_file(folder: Path) -> list[str]:
        write(value(), folder / name)
        return [name]

    return write_file


def _given(value: Any) -> Any:
    return value


def _written_already(names: list[str]) -> WriteFiles:
    return lambda folder: names


def _read_generators(path: Path) -> GeneratorStates:
    states = read_plain(path, arrays=True)
    if not isinstance(states, Mapping) or any(name not in states for name in _GENERATORS):
        raise CheckpointError(f"{path.name} in {path.parent} does not hold the generators {', '.join(_GENERATORS)}.")
    return GeneratorStates(states=states)
