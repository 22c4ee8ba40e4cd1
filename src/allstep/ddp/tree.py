"""Sums whose order does not depend on who computes which part: a binary tree over numbered places.

Floating-point sums depend on their order. Here the places 0, 1, 2, … are the leaves of a tree in which every node is the sum
of the two below it, ((0 + 1) + (2 + 3)) + …, and a place without a value counts as zero. A rank that computes an aligned
block of places, as many as a power of two, computes a subtree of it; what ranks have is then added in the same way, as `shm`
and two ranks of any backend do by themselves. So 1, 2 and 4 ranks come to the same bits.

Values are added as soon as both sides of a node are complete, like carries of a binary counter: no more than one value per
level is kept.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

import torch

__all__ = ["GradientTree", "TreeSum"]

Value = TypeVar("Value")


class TreeSum(Generic[Value]):
    """The sum of values that come in the order of their places; some places may have none.

    Args:
        add: gives the sum of two values; may change either.
    """

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        self._add = add
        self.kept: list[tuple[int, Value]] = []
        """Complete nodes: a place in each, and its sum; oldest and largest first."""

    def put(self, place: int, value: Value) -> None:
        """Take in the value of `place`, which is larger than those before."""
        self.close(place)
        self.kept.append((place, value))

    def close(self, place: int) -> None:
        """No value below `place` is still to come: add what is complete by that."""
        while len(self.kept) > 1 and not _meet_above(self.kept[-2][0], self.kept[-1][0], place):
            self._carry()

    def total(self) -> Value | None:
        """The sum of all; None without a value."""
        while len(self.kept) > 1:
            self._carry()
        return self.kept[0][1] if self.kept else None

    def _carry(self) -> None:
        (place, left), (_, right) = self.kept[-2:]
        self.kept[-2:] = [(place, self._add(left, right))]


class GradientTree:
    """The gradients of `parameters` of one rank, summed over the places of a window as a tree.

    autograd adds the second of each two neighbours to the first by itself, which is the lowest level of the tree. What two
    neighbours have made together is taken from the parameters before the next place begins, and given back at the end.

    Args:
        parameters: all that are reduced.
        apart: indices of those whose gradients stay where they are, and are summed in the order in which they come.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], apart: Collection[int] = ()) -> None:
        self._parameters, self._apart = parameters, frozenset(apart)
        self._place: int | None = None
        self._sum = TreeSum(_add_all)
        self.most_kept = 0
        """The largest number of sets of gradients that were kept aside at once."""

    def begin(self, place: int) -> None:
        """The gradients that come next are of `place`, which is larger than those before."""
        before, self._place = self._place, place
        if before is None or before >> 1 == place >> 1:
            return
        self._sum.put(before >> 1, self._take())
        self._sum.close(place >> 1)
        self.most_kept = max(self.most_kept, len(self._sum.kept))

    def give_back(self, indices: Collection[int]) -> None:
        """Nothing more comes for parameters `indices`: their `.grad` is the sum of all places from now on.

        Called in the backward of the last place, for one bucket after the other.
        """
        for _, kept in reversed(self._sum.kept):
            held, added = [], []
            for index in indices:
                parameter, value = self._parameters[index], kept[index]
                kept[index] = None
                if value is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = value
                else:
                    held.append(parameter.grad)
                    added.append(value)
            if held:
                torch._foreach_add_(held, added)

    def __bool__(self) -> bool:
        """Whether anything is kept aside."""
        return bool(self._sum.kept)

    def clear(self) -> None:
        """The window has ended."""
        self._place, self._sum.kept = None, []

    def _take(self) -> "list[torch.Tensor | None]":
        taken: list[torch.Tensor | None] = []
        for index, parameter in enumerate(self._parameters):
            if index in self._apart:
                taken.append(None)
            else:
                taken.append(parameter.grad)
                parameter.grad = None
        return taken


def _meet_above(left: int, right: int, place: int) -> bool:
    """Whether the smallest subtree with both places has `place` too, so that something may still come to the right one."""
    level = (left ^ right).bit_length()
    return place >> level == right >> level


@torch.no_grad()
def _add_all(left: "list[torch.Tensor | None]", right: "list[torch.Tensor | None]") -> "list[torch.Tensor | None]":
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        sums, added = zip(*both, strict=True)
        torch._foreach_add_(list(sums), list(added))
    return [a if a is not None else b for a, b in zip(left, right, strict=True)]
