"""Samples to a micro-batch, and a micro-batch to a device."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from allstep.errors import DataError

__all__ = ["collate", "select_columns", "size_of", "to_device"]

_LABELS = ("labels", "label", "label_ids")
"""Names of labels, of which the first that a sample has is handed on as "labels"."""


def collate(samples: Sequence[Any]) -> Any:
    """Stack samples into tensors with the sample as first dimension; columns "label" and "label_ids" become "labels".

    Python floats become torch's default dtype, lists and tuples of numbers or arrays rows, and a "label" an int64 or float32,
    as losses expect them. Columns of text, and of nothing (None), are left out, for no model takes them.

    Raises:
        DataError: a column cannot be stacked, or not every sample has it.
    """
    samples = [_named(sample) for sample in samples]
    if not samples or not isinstance(samples[0], Mapping):
        return default_collate(samples)
    label = next((name for name in _LABELS if samples[0].get(name) is not None), None)
    batch = {}
    for key in samples[0]:
        if key not in _LABELS or key == label:
            values = [_value(sample, key) for sample in samples]
            if not isinstance(values[0], str) and any(value is not None for value in values):
                stacked = _stacked(key, values)
                is_plain = key == "label" or (key == "label_ids" and not isinstance(values[0], torch.Tensor))
                batch["labels" if key == label else key] = _plain_label(stacked) if is_plain else stacked
    return batch


def _named(sample: Any) -> Any:
    """What a sample that is an object has, by name; any other sample as it is."""
    if is_dataclass(sample):
        return {field.name: getattr(sample, field.name) for field in fields(sample)}
    is_plain = isinstance(sample, (Mapping, Sequence, torch.Tensor, np.ndarray, np.generic)) or not hasattr(sample, "__dict__")
    return sample if is_plain else vars(sample)


def _value(sample: Mapping[str, Any], key: str) -> Any:
    if key not in sample:
        raise DataError(f"Column {key!r} is not in every sample: found one with {', '.join(map(str, sample)) or 'nothing'}.")
    return sample[key]


def _stacked(key: str, values: list[Any]) -> Any:
    try:
        if not isinstance(values[0], (list, tuple)) or hasattr(values[0], "_fields"):
            return torch.tensor(values) if isinstance(values[0], (bool, int, float)) else default_collate(values)
        leaf = _leaf(values)
        if isinstance(leaf, np.generic):
            return torch.from_numpy(np.array(values))
        if isinstance(leaf, (np.ndarray, torch.Tensor)):
            return _rows(values)
        # default_collate would take lists of numbers for columns
        return torch.tensor(values) if leaf is None or isinstance(leaf, (bool, int, float)) else default_collate(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"Column {key!r} cannot be stacked: {error}. Give the Trainer a data_collator that pads it.") from None


def _leaf(values: Any) -> Any:
    """The first thing that is no list or tuple; None where all are empty."""
    while isinstance(values, (list, tuple)):
        values = values[0] if values else None
    return values


def _rows(values: Any) -> torch.Tensor:
    """Lists of lists of arrays as one tensor."""
    if isinstance(values, (list, tuple)):
        return torch.stack([_rows(each) for each in values])
    return torch.as_tensor(values)


def _plain_label(label: Any) -> Any:
    if not isinstance(label, torch.Tensor):
        return label
    return label.float() if label.is_floating_point() else label.long()


def select_columns(sample: Any, columns: frozenset[str] | None) -> Any:
    """`sample` with only those of its `columns` that a model takes; all of it where `columns` is None or it has no names."""
    if columns is None or not isinstance(sample, Mapping):
        return sample
    return {key: value for key, value in sample.items() if key in columns}


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`; from pinned memory the copy runs beside the computation."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        moved = {key: to_device(item, device) for key, item in value.items()}
        return moved if isinstance(value, dict) else type(value)(moved)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    return value


def size_of(batch: Any) -> int | None:
    """Number of samples in a collated batch: the first dimension of the first tensor in it; None without one."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for item in items if (size := size_of(item)) is not None), None)
