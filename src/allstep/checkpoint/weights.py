"""A model's weights as files, and files as a model's weights: Hugging Face's names, no wrapper prefixes, strict.

safetensors takes only whole tensors that share no memory, so tied tensors are written once, under the first of their names,
and come back to all of them.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from allstep.checkpoint.plain_files import read_plain, write_plain
from allstep.errors import CheckpointError

__all__ = [
    "EXTRA_STATE_FILE",
    "INDEX_FILE",
    "WEIGHTS_FILE",
    "read_weights",
    "restore_weights",
    "unwrapped",
    "write_pretrained",
    "write_weights",
]

WEIGHTS_FILE = "model.safetensors"
"""The weights, by name."""
INDEX_FILE = "model.safetensors.index.json"
"""Where Hugging Face split the weights into several files: which tensor lies in which."""
EXTRA_STATE_FILE = "model_extra_state.pt"
"""What a module's `get_extra_state` gave, where that is no tensor. Rare."""

_WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Classes that hold the user's model under one attribute, by class name: torch's and allstep's alike."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside data-parallel wrappers and `torch.compile`."""
    while (attribute := _WRAPPERS.get(type(model).__name__)) is not None and hasattr(model, attribute):
        model = getattr(model, attribute)
    return model


def write_weights(model: nn.Module, folder: Path) -> list[str]:
    """Write the weights of `model` into `folder`; the names of the files written.

    A model with `save_pretrained` (transformers, diffusers, peft) also writes its own files there, so that
    `from_pretrained` reads the folder. Where those do not hold every tensor under the model's own name (adapters only, a
    conversion to older names), `model.safetensors` is written by us all the same: a resumed run needs all of it.
    """
    model = unwrapped(model)
    written = write_pretrained(model, folder) if callable(getattr(model, "save_pretrained", None)) else []
    tensors, extra = _state(model)
    if not _holds_exactly(folder, tensors):
        for name in written:
            if name.startswith("model-") or name == INDEX_FILE:  # these would be read in place of ours
                (folder / name).unlink()
        written = [name for name in written if (folder / name).exists() and name != WEIGHTS_FILE]
        save_file(_writable(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        written.append(WEIGHTS_FILE)
    if extra:
        write_plain(extra, folder / EXTRA_STATE_FILE)
        written.append(EXTRA_STATE_FILE)
    return written


def write_pretrained(owner: Any, folder: Path) -> list[str]:
    """Let `owner.save_pretrained` write into `folder`; the names of its files.

    It writes beside first, and its files are moved in: only so is it known which are its own.
    """
    beside = Path(tempfile.mkdtemp(dir=folder, prefix="pretrained-"))
    try:
        owner.save_pretrained(beside)
        names = [path.relative_to(beside).as_posix() for path in sorted(beside.rglob("*")) if path.is_file()]
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(beside / name, folder / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return names


def read_weights(folder: Path) -> dict[str, Any]:
    """Read the weights in `folder` into memory, by name, without a model.

    Raises:
        CheckpointError: there are none, they are damaged, or they are in a format that can run code when read.
    """
    values: dict[str, Any] = {}
    for name in _weight_files(folder):
        values |= _read_tensors(folder / name)
    if (folder / EXTRA_STATE_FILE).exists():
        values |= read_plain(folder / EXTRA_STATE_FILE)
    return values


def restore_weights(model: nn.Module, values: Mapping[str, Any], source: Path) -> None:
    """Copy `values`, read from the folder `source`, into `model`, which keeps its tensors' devices and strides.

    Raises:
        CheckpointError: a tensor of the model is missing, one in the file has no place in the model, a shape or dtype
            differs, or tensors that the model ties have different values. The model is then as it was.
    """
    model = unwrapped(model)
    own = model.state_dict()
    by_name = {_clean(key): key for key in own}
    values = _without_prefix(values, by_name)
    first = _first_names(own)
    chosen: dict[str, Any] = {}  # what each tensor of the model, under its first name, is set to
    problems = [_listed("The model has no", [name for name in values if name not in by_name], " which the files hold")]
    for name, key in by_name.items():
        if name in values:
            value, other = values[name], chosen.setdefault(first[key], values[name])
            problems.append(_difference(name, own[key], value) or _conflict(name, _clean(first[key]), value, other))
    problems.append(_listed("The files lack", [name for name, key in by_name.items() if first[key] not in chosen]))
    if any(problems):
        raise CheckpointError(
            f"The weights in {source} do not fit this {type(model).__name__}. {' '.join(filter(None, problems))} "
            f"Build the same model as the run that wrote them."
        )
    model.load_state_dict({key: chosen[first[key]] for key in own}, strict=True)


def _state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model's tensors, and what else its modules want to keep, by clean name."""
    state = {_clean(key): value for key, value in model.state_dict().items()}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def _clean(key: str) -> str:
    """The name a tensor has in the user's model, where parts of it may be compiled."""
    return key.replace("_orig_mod.", "")


def _first_names(tensors: Mapping[str, Any]) -> dict[str, str]:
    """For each name the first name under which the very same memory is known; its own where it is tied to nothing."""
    seen: dict[Any, str] = {}
    first = {}
    for name, value in tensors.items():
        if isinstance(value, Tensor) and value.numel() and value.device.type != "meta":
            place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            first[name] = seen.setdefault(place, name)
        else:
            first[name] = name
    return first


def _writable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, on the host, contiguous, and with memory of its own."""
    first = _first_names(tensors)
    storages: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        if first[name] != name:
            continue
        host = tensor.detach().to("cpu").contiguous()
        storage = host.untyped_storage().data_ptr()
        result[name] = host.clone() if storage in storages else host  # a view into another tensor's memory
        storages.add(storage)
    return result


def _holds_exactly(folder: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the weight files in `folder` hold each of `tensors` under one of its names, and nothing else."""
    if not (folder / WEIGHTS_FILE).exists() and not (folder / INDEX_FILE).exists():
        return False
    found: set[str] = set()
    for name in _weight_files(folder):
        with safe_open(folder / name, framework="pt") as file:
            found |= set(file.keys())
    first = _first_names(tensors)
    return found <= set(tensors) and {first[name] for name in found} == set(first.values())


def _weight_files(folder: Path) -> list[str]:
    if (folder / WEIGHTS_FILE).exists():
        return [WEIGHTS_FILE]
    if (folder / INDEX_FILE).exists():
        try:
            return sorted(set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{INDEX_FILE} in {folder} cannot be read: {error!r}.") from error
    pickled = sorted(path.name for path in folder.glob("*.bin") if path.name != "training_args.bin")
    hint = f" {pickled[0]} is a pickled file, which allstep does not read: reading it can run code." if pickled else ""
    raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}.{hint}")


def _without_prefix(values: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """`values` as they are, or without the `module.` of a wrapper from inside which somebody saved them."""
    if not values or any(name in own or not name.startswith("module.") for name in values):
        return values
    return {name.removeprefix("module."): value for name, value in values.items()}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing from {path.parent}.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} in {path.parent} is damaged: {error}.") from error


def _difference(name: str, own: Any, value: Any) -> str:
    if not isinstance(own, Tensor) or not isinstance(value, Tensor):
        return ""
    if own.shape != value.shape:
        return f"{name} has shape {tuple(value.shape)} in the files, {tuple(own.shape)} in the model."
    if own.dtype != value.dtype:
        return f"{name} is {value.dtype} in the files, {own.dtype} in the model."
    return ""


def _conflict(name: str, first: str, value: Any, other: Any) -> str:
    if value is other or not isinstance(value, Tensor) or torch.equal(value, other):
        return ""
    return f"{first} and {name} are one tensor in the model and two different ones in the files."


def _listed(what: str, names: list[str], after: str = "") -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{what} {', '.join(names[:5])}{more}{',' if after else ''}{after}."
