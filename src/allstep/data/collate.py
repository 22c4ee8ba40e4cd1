"""Samples to a micro-batch, and a micro-batch to a device."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from allstep.errors import DataError

__all__ = ["collate", "select_columns", "size_of", "to_device"]

_LABELS = ("label", "label_ids")


def collate(samples: Sequence[Any]) -> Any:
    """Stack samples into tensors with the sample as first dimension; columns "label" and "label_ids" become "labels".

    Python floats become torch's default dtype, lists of numbers rows.
    """
    if samples and is_dataclass(samples[0]):
        samples = [{field.name: getattr(sample, field.name) for field in fields(sample)} for sample in samples]
    if samples and isinstance(samples[0], Mapping):
        return {"labels" if key in _LABELS else key: _stacked(key, [sample[key] for sample in samples]) for key in samples[0]}
    return default_collate(list(samples))


def _stacked(key: str, values: list[Any]) -> Any:
    first: Any = values
    while isinstance(first, list) and first:
        first = first[0]
    if not isinstance(first, (bool, int, float)):
        return default_collate(values)  # which takes lists of numbers for columns, and makes Python floats float64
    try:
        return torch.tensor(values)
    except ValueError as error:
        raise DataError(f"Column {key!r} cannot be stacked: {error}. Give the Trainer a data_collator that pads it.") from None


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
