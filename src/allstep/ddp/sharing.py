"""Parameters that several living wrappers share: each gradient is reduced by one of them, the newest.

An older wrapper lends them, and takes them back when the newer one is dropped or released. Otherwise two reducers would average
the same gradient, one on top of the other.
"""

import weakref
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from allstep.ddp.reducer import Reducer

__all__ = ["SharedParameters"]

_LIVING: "weakref.WeakSet[SharedParameters]" = weakref.WeakSet()


class SharedParameters:
    """The part of a wrapper that knows of others."""

    module: nn.Module
    _ignored: set[str]
    _index_of: dict[int, int]
    _is_released: bool
    _reducer: "Reducer"
    _lent: "dict[int, weakref.ref[SharedParameters]]"
    """`id` of a parameter -> the wrapper that reduces it."""

    @property
    @abstractmethod
    def process_group(self) -> dist.ProcessGroup | None: ...

    @abstractmethod
    def _fit_reducer(self) -> None:
        """Make another reducer, for the parameters that the module has and that are not lent."""

    def _take_from_others(self) -> None:
        """Let the older wrappers over the same ranks lend what they share with this one."""
        for other in list(_LIVING):
            if other is self or other._is_released or other.process_group is not self.process_group:
                continue
            shared = self._index_of.keys() & other._index_of.keys()
            if shared:
                self._reducer.is_shared = True
                other._lend(shared, self)
        _LIVING.add(self)

    def _lend(self, shared: Iterable[int], to: "SharedParameters") -> None:
        self._lent |= dict.fromkeys(shared, weakref.ref(to))
        self._fit_reducer()

    def _take_back(self) -> None:
        """What was lent to wrappers that are gone."""
        kept = {}
        for identity, borrower in self._lent.items():
            wrapper = borrower()
            if wrapper is not None and not wrapper._is_released:
                kept[identity] = borrower
        if len(kept) < len(self._lent):
            self._lent = kept
            self._fit_reducer()

    def _lent_names(self) -> set[str]:
        return {name for name, parameter in self.module.named_parameters() if id(parameter) in self._lent}
