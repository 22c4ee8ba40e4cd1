"""Rows that ranks computed, put together in rank order, on every rank.

Arrays travel straight into the result: a rank holds its own batches, the result, and one piece that is on its way. Only their
shapes are pickled.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from allstep.comm.communicator import Communicator
from allstep.errors import DataError

__all__ = ["PADDING", "by_batch", "gathered", "in_order", "outlined", "to_numpy"]

PADDING = -100
"""Fills rows that are shorter than the longest, as a label that counts nowhere."""
PIECE = 16 << 20
"""Bytes that are sent at once."""


class _Array(NamedTuple):
    """What a rank has of an array, over all of its batches."""

    rows: int
    widest: tuple[int, ...]
    """Of all dimensions but the first."""
    dtype: str


def to_numpy(value: Any) -> Any:
    """Tensors as numpy arrays, in whatever holds them; bfloat16, which numpy lacks, as float32."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    if isinstance(value, Mapping):
        return {key: to_numpy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(to_numpy(item) for item in value)
    return value


def outlined(batches: Sequence[Any]) -> Any:
    """What a rank has, for `gathered`: shapes in place of arrays, anything else as it is; None without batches.

    Raises:
        DataError: batches that differ in more than the sizes of arrays.
    """
    if not batches:
        return None
    first = batches[0]
    if isinstance(first, Mapping):
        return {key: outlined([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple):
        return tuple(outlined([batch[index] for batch in batches]) for index in range(len(first)))
    if not isinstance(first, np.ndarray) or first.dtype.hasobject:
        return list(batches)
    arrays = [np.atleast_1d(batch) for batch in batches]
    return _Array(
        rows=sum(map(len, arrays)),
        widest=_widest([array.shape[1:] for array in arrays]),
        dtype=np.result_type(*arrays).str,
    )


def gathered(batches: Sequence[Any], outlines: Sequence[Any], communicator: Communicator, device: torch.device) -> Any:
    """Collective. The rows of all ranks, on every rank; arrays of unequal width are filled with `PADDING`, or 0 where the
    dtype has none.

    Args:
        batches: what this rank has, as `to_numpy` gives it, in order; it may have none.
        outlines: by rank, what `outlined` said about its batches.
        device: what the group can send.
    """
    known = [outline for outline in outlines if outline is not None]
    if not known:
        return None
    first = known[0]
    if isinstance(first, Mapping):
        return {key: gathered([batch[key] for batch in batches], _parts(outlines, key), communicator, device) for key in first}
    if isinstance(first, _Array):
        return _array(batches, outlines, communicator, device)
    if isinstance(first, tuple):
        return tuple(
            gathered([batch[index] for batch in batches], _parts(outlines, index), communicator, device)
            for index in range(len(first))
        )
    return [batch for outline in known for batch in outline]


def in_order(value: Any, batches: Sequence[tuple[int, int]]) -> Any:
    """`value`, which `gathered` put together from `batches` (number and samples of each), in the order of their numbers."""
    numbers = [number for number, _ in batches]
    if numbers == sorted(numbers):
        return value
    return _permuted(value, np.argsort(numbers, kind="stable"), np.argsort(np.repeat(*np.transpose(batches)), kind="stable"))


def by_batch(value: Any, sizes: Sequence[int]) -> Any:
    """`value`, in order, as a list with what each batch of `sizes` rows has; None where there is nothing."""
    if isinstance(value, Mapping):
        parts = {key: by_batch(item, sizes) for key, item in value.items()}
        return [{key: part[at] for key, part in parts.items()} for at in range(len(sizes))]
    if isinstance(value, tuple):
        return [*zip(*(by_batch(item, sizes) for item in value), strict=True)]
    if isinstance(value, np.ndarray) and len(value) == sum(sizes):
        return np.split(value, np.cumsum(sizes)[:-1])
    return None if value is None else list(value)


def _permuted(value: Any, batches: Any, rows: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _permuted(item, batches, rows) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_permuted(item, batches, rows) for item in value)
    if isinstance(value, np.ndarray):
        order = rows if len(value) == len(rows) else batches
        return value[order] if len(value) == len(order) else value
    return [value[index] for index in batches] if isinstance(value, list) and len(value) == len(batches) else value


def _parts(outlines: Sequence[Any], key: Any) -> list[Any]:
    return [None if outline is None else outline[key] for outline in outlines]


def _array(batches: Sequence[Any], outlines: Sequence[Any], communicator: Communicator, device: torch.device) -> Any:
    known = [outline for outline in outlines if outline is not None]
    widest = _widest([outline.widest for outline in known])
    dtype = np.result_type(*(np.dtype(outline.dtype) for outline in known))
    result = np.empty((sum(outline.rows for outline in known), *widest), dtype)
    at = 0
    for rank, outline in enumerate(outlines):
        if outline is not None:
            block = result[at : at + outline.rows]
            if rank == communicator.rank:
                _fill(block, batches)
            _send(block, rank, communicator, device)
            at += outline.rows
    return result


def _fill(block: Any, batches: Sequence[Any]) -> None:
    at = 0
    for batch in map(np.atleast_1d, batches):
        rows = block[at : at + len(batch)]
        if batch.shape != rows.shape:
            rows[...] = 0 if block.dtype.kind in "bu" else PADDING  # booleans and unsigned numbers have no -100
        place = (slice(None), *map(slice, batch.shape[1:]))
        rows[place] = batch
        at += len(batch)


def _send(block: Any, source: int, communicator: Communicator, device: torch.device) -> None:
    if communicator.size == 1 or not block.nbytes:
        return
    for piece in torch.from_numpy(block.reshape(-1).view(np.uint8)).split(PIECE):
        sent = piece.to(device)
        communicator.broadcast([sent], source)
        if sent is not piece:
            piece.copy_(sent)


def _widest(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    if len({len(shape) for shape in shapes}) > 1:
        found = ", ".join(str(1 + number) for number in sorted({len(shape) for shape in shapes}))
        raise DataError(
            f"What the model said cannot be put together: arrays have {found} dimensions, expected as many in every batch. "
            f"Give them one shape in preprocess_logits_for_metrics, or leave them out by ignore_keys."
        )
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))
