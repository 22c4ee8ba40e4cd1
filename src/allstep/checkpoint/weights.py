"""A model's weights as files, and files as a model's weights: Hugging Face's names, no wrapper prefixes, strict.

safetensors takes only whole tensors that share no memory, so tied tensors are written once, under the first of their names,
and come back to all of them.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from allstep.checkpoint.adapters import AdapterWeights, adapter_files, adapter_keys, changes_only, has_adapters
from allstep.checkpoint.converted import can_convert, read_converted
from allstep.checkpoint.foreign import weights_in_python
from allstep.checkpoint.names import clean_names, unwrapped, without_prefixes
from allstep.checkpoint.plain_files import copied, read_plain, write_plain
from allstep.errors import CheckpointError

__all__ = [
    "EXTRA_STATE_FILE",
    "INDEX_FILE",
    "WEIGHTS_FILE",
    "copied_weights",
    "read_weights",
    "restore_weights",
    "write_beside",
    "write_pretrained",
    "write_weights",
    "writes_itself",
]

WEIGHTS_FILE = "model.safetensors"
"""The weights, by name."""
INDEX_FILE = "model.safetensors.index.json"
"""Where Hugging Face split the weights into several files: which tensor lies in which."""
EXTRA_STATE_FILE = "model_extra_state.pt"
"""What a module's `get_extra_state` gave, where that is no tensor. Rare."""


def writes_itself(owner: Any) -> bool:
    """Whether a model or tokenizer has a `save_pretrained`, which alone knows what files it consists of."""
    return callable(getattr(owner, "save_pretrained", None))


def write_weights(model: nn.Module, folder: Path, by: Callable[[Path], object] | None = None) -> list[str]:
    """Write the weights of `model` into `folder`; the names of the files written.

    `by` is the user's way to write a model into a folder, in place of `save_pretrained`.

    A model with `save_pretrained` (transformers, diffusers, peft) also writes its own files there, so that
    `from_pretrained` reads the folder. Where a resumed run would not get every tensor back from those, `model.safetensors` is
    written by us all the same. It does from tensors under the model's own names, from those of transformers' conversions, and
    from PEFT's adapters where they hold all that training changes.
    """
    model = unwrapped(model)
    if by is None and writes_itself(model):
        by = model.save_pretrained  # type: ignore[assignment]  # callable, as it writes itself
    written = [] if by is None else write_beside(by, folder)
    tensors, extra = _state(model)
    if not _holds_model(folder, model, tensors) and not _holds_adapters(folder, model):
        for name in written:
            if name.startswith("model-") or name == INDEX_FILE:  # these would be read in place of ours
                (folder / name).unlink()
        written = [name for name in written if (folder / name).exists() and name != WEIGHTS_FILE]
        written += _write_tensors(_writable(tensors), folder)
    return written + _write_extra(extra, folder)


def copied_weights(model: nn.Module) -> Callable[[Path], list[str]]:
    """A copy of the weights of `model`, in memory, as what writes it into a folder. Not for a model that writes itself."""
    tensors, extra = _state(unwrapped(model))
    kept, kept_extra = _writable(tensors, apart=True), copied(extra)
    return lambda folder: _write_tensors(kept, folder) + _write_extra(kept_extra, folder)


def write_pretrained(owner: Any, folder: Path) -> list[str]:
    """Let `owner.save_pretrained` write into `folder`; the names of its files."""
    return write_beside(owner.save_pretrained, folder)


def write_beside(write: Callable[[Path], object], folder: Path) -> list[str]:
    """Let `write` put files into `folder`; their names.

    It writes beside first, and its files are moved in: only so is it known which are its own.
    """
    beside = Path(tempfile.mkdtemp(dir=folder, prefix="pretrained-"))
    try:
        write(beside)
        names = [path.relative_to(beside).as_posix() for path in sorted(beside.rglob("*")) if path.is_file()]
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(beside / name, folder / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return names


def read_weights(folder: Path) -> dict[str, Any]:
    """Read the weights in `folder` into memory, by name, without a model; `AdapterWeights` where there are only adapters.

    Raises:
        CheckpointError: there are none, they are damaged, or they are in a format that can run code when read.
    """
    if adapters := _only_adapters(folder):
        return AdapterWeights(
            {
                (adapter, name): value
                for adapter, file in adapters.items()
                for name, value in _read_tensors(folder / file).items()
            }
        )
    values: dict[str, Any] = {}
    for name in _weight_files(folder):
        values |= _read_tensors(folder / name)
    if (folder / EXTRA_STATE_FILE).exists():
        values |= read_plain(folder / EXTRA_STATE_FILE)
    return values


def restore_weights(model: nn.Module, values: Mapping[str, Any], source: Path) -> str | None:
    """Copy `values`, read from the folder `source`, into `model`, which keeps its tensors' devices and strides.

    Names that differ from the model's only by what wrappers add are taken for the model's where it is clear for which; the
    result is then a line that says so, else None. Adapters leave the rest of the model as it is.

    Raises:
        CheckpointError: a tensor of the model is missing, one in the file has no place in the model, a shape or dtype
            differs, or tensors that the model ties have different values. The model is then as it was.
    """
    model = unwrapped(model)
    own = model.state_dict()
    clean = clean_names(model, own)
    by_name = {name: key for key, name in clean.items()}
    if isinstance(values, AdapterWeights):
        values, by_name = _adapters_of(model, own, values, by_name, source)
    values, added = without_prefixes(values, by_name)
    if any(name not in by_name for name in values) and (converted := read_converted(model, source)) is not None:
        values = converted
    first = _first_names(own)
    chosen: dict[str, Any] = {}  # what each tensor of the model, under its first name, is set to
    problems = [_listed("The model has no", [name for name in values if name not in by_name], " which the files hold")]
    for name, key in by_name.items():
        if name in values:
            value, other = values[name], chosen.setdefault(first[key], values[name])
            problems.append(_difference(name, own[key], value) or _conflict(name, clean[first[key]], value, other))
    problems.append(_listed("The files lack", [name for name, key in by_name.items() if first[key] not in chosen]))
    if any(problems):
        raise CheckpointError(
            f"The weights in {source} do not fit this {type(model).__name__}. {' '.join(filter(None, problems))} "
            f"Build the same model as the run that wrote them."
        )
    model.load_state_dict({key: chosen[first[key]] for key in by_name.values()}, strict=len(by_name) == len(own))
    return f"the weights in {source} have names with {added}, as wrappers write them; they were read without" if added else None


def _state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model's tensors, and what else its modules want to keep, by the names of the user's model."""
    own = model.state_dict()
    state = {name: own[key] for key, name in clean_names(model, own).items()}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


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


def _writable(tensors: Mapping[str, Tensor], *, apart: bool = False) -> dict[str, Tensor]:
    """Each tensor once, on the host, contiguous, and with memory of its own; `apart`: none of it the model's."""
    first = _first_names(tensors)
    storages = {_storage(tensor) for tensor in tensors.values()} if apart else set()
    result = {}
    for name, tensor in tensors.items():
        if first[name] != name:
            continue
        host = tensor.detach().to("cpu").contiguous()
        result[name] = host.clone() if _storage(host) in storages else host  # a view into another tensor's memory
        storages.add(_storage(result[name]))
    return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _write_tensors(tensors: dict[str, Tensor], folder: Path) -> list[str]:
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return [WEIGHTS_FILE]


def _write_extra(extra: Mapping[str, Any], folder: Path) -> list[str]:
    if extra:
        write_plain(extra, folder / EXTRA_STATE_FILE)
    return [EXTRA_STATE_FILE] if extra else []


def _holds_model(folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the weight files in `folder` hold each of `tensors`, and nothing else: by one of its names, or converted."""
    if not (folder / WEIGHTS_FILE).exists() and not (folder / INDEX_FILE).exists():
        return False
    found: dict[str, int] = {}
    for name in _weight_files(folder):
        with safe_open(folder / name, framework="pt") as file:
            found |= {key: math.prod(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - no mapping
    first = _first_names(tensors)
    if found.keys() <= tensors.keys():
        return {first[name] for name in found} == set(first.values())
    return can_convert(model, {name: tensors[name] for name in first.values()}, sum(found.values()))


def _holds_adapters(folder: Path, model: nn.Module) -> bool:
    """Whether `folder` holds adapters of `model`, and they are all that training changes of it."""
    if not has_adapters(model):
        return False
    names = set()
    for adapter, path in adapter_files(folder).items():
        with safe_open(folder / path, framework="pt") as file:
            names |= {(adapter, name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    return changes_only(model, model.state_dict(), names)


def _only_adapters(folder: Path) -> dict[str, str]:
    """Files of adapters, by adapter, where the whole model is not there too."""
    return {} if (folder / WEIGHTS_FILE).exists() or (folder / INDEX_FILE).exists() else adapter_files(folder)


def _adapters_of(
    model: nn.Module, own: Mapping[str, Any], values: AdapterWeights, by_name: Mapping[str, str], source: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Weights of adapters under the names of `model`, and those of its names that are read from adapters."""
    if not has_adapters(model):
        raise CheckpointError(
            f"The weights in {source} are adapters of PEFT, and this {type(model).__name__} has none. Give the Trainer what "
            f"peft.get_peft_model makes of it, as the run did that wrote them."
        )
    clean = {key: name for name, key in by_name.items()}
    keys = adapter_keys(model, own)
    wanted = {*adapter_keys(model, own, with_embeddings=False).values(), *(keys[name] for name in values if name in keys)}
    renamed = {clean[keys[at]] if at in keys else " of adapter ".join(reversed(at)): value for at, value in values.items()}
    return renamed, {name: key for name, key in by_name.items() if key in wanted}


def _weight_files(folder: Path) -> list[str]:
    if (folder / WEIGHTS_FILE).exists():
        return [WEIGHTS_FILE]
    if (folder / INDEX_FILE).exists():
        try:
            return sorted(set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{INDEX_FILE} in {folder} cannot be read: {error!r}.") from error
    raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}.{weights_in_python(folder, WEIGHTS_FILE)}")


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
