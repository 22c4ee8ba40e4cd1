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

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from allstep.checkpoint.generators import GeneratorStates
from allstep.checkpoint.plain_files import read_json, read_plain, write_json, write_plain
from allstep.checkpoint.store import WriteFiles
from allstep.checkpoint.weights import WEIGHTS_FILE, read_weights, restore_weights, write_pretrained, write_weights
from allstep.errors import CheckpointError

__all__ = [
    "ReadState",
    "Stateful",
    "TrainState",
    "model_files",
    "rank_files",
    "read_state",
    "restore_state",
    "rng_file",
    "shared_files",
]

_ARGUMENTS_FILE = "training_args.json"
_STATE_FILE = "trainer_state.json"
_STATEFUL = ("optimizer", "scheduler", "scaler", "data")
_GENERATORS = ("python", "numpy", "cpu")


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
    files: dict[str, WriteFiles] = {WEIGHTS_FILE: lambda folder: write_weights(state.model, folder)}
    if hasattr(state.processing_class, "save_pretrained"):
        files["processing_class"] = lambda folder: write_pretrained(state.processing_class, folder)
    return files


def shared_files(state: TrainState) -> dict[str, WriteFiles]:
    """How to write the files that a checkpoint has once, which rank 0 writes; nothing is read or written yet."""
    files = model_files(state)
    for part in _STATEFUL:
        if getattr(state, part) is not None:
            files[f"{part}.pt"] = _stateful_file(f"{part}.pt", getattr(state, part))
    files[_STATE_FILE] = _json_file(_STATE_FILE, state.trainer_state)
    files[_ARGUMENTS_FILE] = _json_file(_ARGUMENTS_FILE, state.training_args)
    return files


def rank_files(state: TrainState, rank: int, world_size: int) -> dict[str, WriteFiles]:
    """How to write the files that each rank writes for itself."""
    if not state.with_generators:
        return {}
    name = rng_file(rank, world_size)

    def write(folder: Path) -> list[str]:
        write_plain(dict(GeneratorStates.capture().states), folder / name)
        return [name]

    return {name: write}


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
            if getattr(state, part) is not None and (part != "data" or (folder / "data.pt").exists())
        },
        trainer_state=read_json(folder / _STATE_FILE),
        training_args=arguments,
        generators=_read_generators(generators) if state.with_generators and generators.exists() else None,
    )


def restore_state(read: ReadState, state: TrainState, source: Path) -> None:
    """Put what was read from the folder `source` into the live objects, except the generators.

    Raises:
        CheckpointError: something does not fit; the message names it. The live objects are then of no more use.
    """
    restore_weights(state.model, read.weights, source)
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


def _stateful_file(name: str, part: Stateful) -> WriteFiles:
    def write(folder: Path) -> list[str]:
        write_plain(part.state_dict(), folder / name)
        return [name]

    return write


def _json_file(name: str, values: Mapping[str, Any]) -> WriteFiles:
    def write(folder: Path) -> list[str]:
        write_json(values, folder / name)
        return [name]

    return write


def _read_generators(path: Path) -> GeneratorStates:
    states = read_plain(path, arrays=True)
    if not isinstance(states, Mapping) or any(name not in states for name in _GENERATORS):
        raise CheckpointError(f"{path.name} in {path.parent} does not hold the generators {', '.join(_GENERATORS)}.")
    return GeneratorStates(states=states)
