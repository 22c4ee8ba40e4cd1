"""Sums of blocks that lie in shared memory, in an order that no rank can change.

A block is summed over ranks as a binary tree, by rank: (0 + 1) + (2 + 3). Blocks are small enough that the sum is still in the
core's cache when it is copied to all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["BLOCK", "COMBINE", "Blocks", "combine", "cuts", "multiply", "own_slices", "tree"]

BLOCK = 256 << 10
"""Bytes of a block: two of them fit into a core's second-level cache."""

_LINE = 64
_HALF = (torch.float16, torch.bfloat16)

COMBINE: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
"""Reduction of torch.distributed -> what combines two tensors."""


def tree(size: int) -> list[tuple[int, int]]:
    """Pairs (left, right) in whose order a tree over `size` leaves adds right to left; the total ends in leaf 0."""
    pairs, step = [], 1
    while step < size:
        pairs += [(left, left + step) for left in range(0, size - step, 2 * step)]
        step *= 2
    return pairs


def cuts(numel: int, itemsize: int, size: int) -> list[int]:
    """size + 1 bounds, in elements, of the slices that ranks reduce: equal within a cache line."""
    line = max(1, _LINE // itemsize)
    return [min(numel, -(-numel * rank // (size * line)) * line) for rank in range(size)] + [numel]


def combine(views: Sequence[torch.Tensor], op: Any, out: torch.Tensor, *, in_place: bool = False) -> None:
    """The tree over `views`, by rank, into `out`; half precision as float32, rounded once.

    Args:
        views: at least two; left as they are.
        op: a reduction of `COMBINE`.
        out: may be one of two.
        in_place: the views may be written to.
    """
    function, pairs = COMBINE[op], tree(len(views))
    scale = 1.0 / len(views) if op == dist.ReduceOp.AVG else 1.0
    is_wide = out.dtype in _HALF and (len(views) > 2 or scale != 1.0)
    leaves = [view.float() for view in views] if is_wide else list(views)
    for left, right in pairs[:-1]:
        leaves[left] = function(leaves[left], leaves[right], out=leaves[left] if in_place or is_wide else None)
    total = leaves[0] if is_wide else out
    function(leaves[0], leaves[pairs[-1][1]], out=total)
    if scale != 1.0:
        multiply(total, scale)
    if is_wide:
        out.copy_(total)


def own_slices(bounds: Sequence[int], itemsize: int, size: int, rank: int) -> list[tuple[int, int]]:
    """By section of (0, ..., numel), first and last element of the slice that a rank reduces."""
    slices = []
    for low, high in pairwise(bounds):
        cut = cuts(high - low, itemsize, size)
        slices.append((low + cut[rank], low + cut[rank + 1]))
    return slices


class Blocks:
    """This rank's slices of tensors that all ranks have in shared memory, block by block.

    Args:
        views: by rank, its tensor: (numel,), of one dtype.
        rank: whose slices.
        bounds: sections of the tensor, (0, ..., numel): in each of them every rank has a slice.
    """

    def __init__(self, views: Sequence[torch.Tensor], rank: int, bounds: Sequence[int]) -> None:
        self._rank, self._size, self._tree = rank, len(views), tree(len(views))
        itemsize = views[0].element_size()
        self._is_half = views[0].dtype in _HALF
        self._step = BLOCK // itemsize
        self.sections: list[list[list[torch.Tensor]]] = []
        """By section, this rank's blocks: each is the ranks' views of it."""
        for start, stop in own_slices(bounds, itemsize, len(views), rank):
            pieces = [view[start:stop].split(self._step) for view in views] if start < stop else []
            self.sections.append([list(block) for block in zip(*pieces, strict=True)])

    def reduce(
        self,
        op: Any = dist.ReduceOp.SUM,
        fresh: Mapping[int, torch.Tensor] | None = None,
        scale: float = 1.0,
        scaled: int | None = None,
    ) -> None:
        """Combine each block over ranks, and give the total to all.

        Args:
            op: a reduction of `COMBINE`.
            fresh: section -> this rank's values of its slice, where they do not lie in its view; for sums only.
            scale: what to multiply totals by, before they are rounded to half precision.
            scaled: sections to scale, the first ones; None: all.
        """
        combine = COMBINE[op]
        if op == dist.ReduceOp.AVG:
            scale = 1.0 / self._size
        for section, blocks in enumerate(self.sections):
            values = fresh[section].split(self._step) if fresh and section in fresh else None
            factor = scale if scaled is None or section < scaled else 1.0
            for number, views in enumerate(blocks):
                own = None if values is None else values[number]
                if self._is_half and (self._size > 2 or factor != 1.0):
                    total = self._wide(views, combine, own)
                elif self._size == 2:
                    total = self._pair(views, combine, own)
                else:
                    total = self._many(views, combine, own)
                if factor != 1.0:
                    multiply(total, factor)
                for view in views:
                    if view is not total:
                        view.copy_(total)

    def _pair(self, views: list[torch.Tensor], combine: Any, fresh: torch.Tensor | None) -> torch.Tensor:
        own, other = views[self._rank], views[1 - self._rank]
        combine(own if fresh is None else fresh, other, out=own)
        return own

    def _many(self, views: list[torch.Tensor], combine: Any, fresh: torch.Tensor | None) -> torch.Tensor:
        leaves = list(views)
        if fresh is not None:
            leaves[self._rank] = fresh
        for left, right in self._tree:
            leaves[left] = combine(leaves[left], leaves[right], out=views[left])
        return views[0]

    def _wide(self, views: list[torch.Tensor], combine: Any, fresh: torch.Tensor | None) -> torch.Tensor:
        """Half precision is summed as float32 and rounded once."""
        leaves = [view.float() for view in views]
        if fresh is not None:
            leaves[self._rank] = fresh.float()
        for left, right in self._tree:
            combine(leaves[left], leaves[right], out=leaves[left])
        return leaves[0]


def multiply(total: torch.Tensor, factor: float) -> None:
    """In place; whole numbers are rounded towards zero."""
    if total.is_floating_point() or total.is_complex():
        total.mul_(factor)
    else:
        total.div_(round(1.0 / factor), rounding_mode="trunc")
