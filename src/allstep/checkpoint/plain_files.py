"""Files of tensors and plain values, and of JSON. Reading one never runs code: nothing here unpickles an object."""

import copy
import io
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allstep.checkpoint.foreign import state_in_python
from allstep.errors import CheckpointError

__all__ = ["copied", "read_json", "read_plain", "write_json", "write_plain"]

_ZIP = b"PK\x03\x04"
"""How each file of torch.save begins. Others, such as a bare pickle, are not even opened by torch."""


def copied(value: Any) -> Any:
    """A copy in the memory of the host, tensors of devices included. Parts that are one object in `value` are one in it, so
    that `write_plain` writes the same bytes."""
    memo = {id(tensor): tensor.detach().to("cpu") for tensor in _tensors(value) if tensor.device.type != "cpu"}
    return copy.deepcopy(value, memo)


def write_plain(value: Any, path: Path) -> None:
    """Write tensors, numbers, strings, and containers of them, bit for bit.

    Raises:
        CheckpointError: `value` holds something that `read_plain` would refuse. Better now than when the run is to be resumed.
    """
    # Without the tensors this is small: a trial costs milliseconds. See test_state.py, "cannot be read back".
    trial = io.BytesIO()
    try:
        torch.save(_without_tensors(value), trial)
        trial.seek(0)
        torch.load(trial, map_location="cpu", weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path.name} would hold something that cannot be read back without running code: {_reason(error)}. Keep "
            f"tensors, numbers, strings, lists and dicts in its state_dict."
        ) from error
    with path.open("xb") as file:  # through Python's own file, whose errors keep their errno; torch's do not
        torch.save(value, file)


def read_plain(path: Path, *, arrays: bool = False) -> Any:
    """Read what `write_plain` wrote, onto the CPU; with `arrays`, also NumPy arrays, as Hugging Face's files have them.

    Raises:
        CheckpointError: the file is missing, damaged, or holds pickled objects.
    """
    allowed = _array_parts() if arrays else []
    try:
        with path.open("rb") as file:
            if file.read(len(_ZIP)) != _ZIP:
                raise CheckpointError(
                    f"{path.name} in {path.parent} is damaged, or was not written by torch.save. "
                    f"{state_in_python(path, runs_code=False)}"
                )
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} in {path.parent} holds more than tensors and plain values: {_reason(error)}. allstep does not "
            f"unpickle objects, since that can run any code. {state_in_python(path, runs_code=True)}"
        ) from error
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing from {path.parent}.") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path.name} in {path.parent} is damaged: {_reason(error)}.") from error


def write_json(value: Mapping[str, Any], path: Path) -> None:
    """Write `value` as indented JSON. Numbers that are not finite are written as Hugging Face's files have them, NaN and
    Infinity, which Python reads back; strict readers of JSON do not."""
    text = json.dumps(value, indent=2) + "\n"
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, or is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing from {path.parent}.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} in {path.parent} is damaged: {_reason(error)}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} in {path.parent} holds a JSON {type(value).__name__}, not an object.")
    return value


def _without_tensors(value: Any) -> Any:
    """`value` with None for each tensor; containers that are not of Python's own kinds stay, for the trial to judge."""
    if isinstance(value, torch.Tensor):
        return None
    if type(value) is dict:
        return {key: _without_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_tensors, value))
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _array_parts() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """What a pickled NumPy array of plain numbers consists of; none of it runs code of the file's choice."""
    module = np._core if hasattr(np, "_core") else np.core  # renamed in NumPy 2
    kinds = (np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float64)
    return [module.multiarray._reconstruct, np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in kinds}]


def _reason(error: BaseException) -> str:
    """What went wrong, in a line, without torch's advice to switch the safety off."""
    text = str(error).strip()
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"(?:GLOBAL |block-listed global |call function )['\"]?([\w.]+)", text)
        return f"it names {named.group(1)}" if named else "it holds pickled objects"
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
