"""Weights that a model of transformers writes under other names than it has, and in other pieces.

Some of its classes keep the names and shapes of the files that they were first published with: experts one by one that the
model holds in one tensor, parts that were renamed since. Their `from_pretrained` turns them into the model's, without losing a
bit.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

__all__ = ["can_convert", "read_converted"]


def can_convert(model: nn.Module, tensors: Mapping[str, Tensor], numbers: int) -> bool:
    """Whether files of as many `numbers` are the same weights as `tensors`, all those of `model`, for `from_pretrained`.

    It reads all in one dtype, so the model has to have one, and it makes a model of `config` alone, as users' classes may not.
    """
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return _is_theirs(model) and len(kinds) == 1 and numbers == sum(tensor.numel() for tensor in tensors.values())


def read_converted(model: nn.Module, folder: Path) -> dict[str, Any] | None:
    """The weights in `folder` under the names of `model`; None where they are not all of it, and nothing else."""
    if not _is_theirs(model):
        return None
    kind: Any = type(model)
    config = copy.deepcopy(model.config)
    try:
        with _without_bar():
            read, found = kind.from_pretrained(folder, config=config, dtype=model.dtype, output_loading_info=True)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):  # whatever it is, names are compared next, and listed
        return None
    return None if any(found.values()) else dict(read.state_dict())


def _is_theirs(model: nn.Module) -> bool:
    return type(model).__module__.startswith("transformers.") and hasattr(type(model), "from_pretrained")


@contextmanager
def _without_bar() -> Iterator[None]:
    from transformers.utils import logging  # it is there, as a model of it is

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
