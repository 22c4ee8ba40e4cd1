"""A bucket in memory that all ranks share: filled with as little traffic as can be, and summed without a copy.

Every rank sums a slice of each section of the bucket, and writes the mean to all. Of a large gradient only what the others sum
is copied into the bucket: this rank's own slice is read from the fresh gradient when it is summed.
"""

from collections.abc import Callable, Sequence

import torch

from allstep.comm.communicator import Communicator, Pending, SharedSum
from allstep.ddp.buffers import GradientStorage
from allstep.ddp.layout import Bucket

__all__ = ["SharedBucket"]

LARGE = 256 << 10
"""Bytes from which a gradient is a section of its own."""


class SharedBucket:
    """Fills and sums one bucket.

    Args:
        communicator: the ranks.
        storage: where the bucket lies.
        bucket: which.
    """

    def __init__(self, communicator: Communicator, storage: GradientStorage, bucket: Bucket) -> None:
        self._flat = storage.buckets[bucket.index]
        self._address = self._flat.data_ptr()
        bounds = [0]
        self._large: dict[int, _Large] = {}
        for slot in bucket.slots:
            if slot.numel * bucket.itemsize >= LARGE and storage.views[slot.parameter].is_contiguous():
                if slot.offset != bounds[-1]:
                    bounds.append(slot.offset)
                self._large[slot.parameter] = _Large(len(bounds) - 1, slot.offset, slot.numel)
                bounds.append(slot.offset + slot.numel)
        if bounds[-1] != bucket.gradients:
            bounds.append(bucket.gradients)
        self._gradients = len(bounds) - 1  # sections; riders come behind them
        if bucket.riders:
            bounds.append(bucket.numel)
        self._communicator = communicator
        self._scaled = storage.gradients[bucket.index]
        self._sum: SharedSum | None = communicator.shared_sum(self._flat, bounds) if bucket.numel else None
        if self._sum is not None:
            slices = self._sum.own_slices()
            for large in self._large.values():
                large.cut(self._flat, *slices[large.section])

    def _is_there(self) -> bool:
        """Whether the bucket lies where all ranks see it; this rank may have got other memory, or somebody moved it."""
        return self._sum is not None and self._flat.data_ptr() == self._address

    def take(
        self, indices: Sequence[int], views: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Bring large gradients in: section -> what is left to be read from there; and the places and gradients of the others.

        Args:
            indices: parameters whose gradients do not lie in the bucket yet.
            views: their places.
            gradients: of them.
        """
        if not self._large or not self._is_there():
            return {}, views, gradients
        fresh: dict[int, torch.Tensor] = {}
        places, others = [], []
        for index, view, gradient in zip(indices, views, gradients, strict=True):
            large = self._large.get(index)
            if large is not None and gradient.dtype is view.dtype and gradient.is_contiguous():
                fresh[large.section] = large.take(gradient)
            else:
                places.append(view)
                others.append(gradient)
        return fresh, places, others

    def start(self, fresh: dict[int, torch.Tensor], scale: float | Callable[[], float]) -> Pending:
        """Start to sum, times `scale`; riders are not scaled.

        A rank whose own bucket lies elsewhere sums by the same rules, as the others cannot know (test_shm_faults.py).
        """
        if self._sum is not None and self._is_there():
            return self._sum.start(fresh, scale, self._gradients, self._flat)
        return _ScaledLater(self._communicator.all_reduce(self._flat), self._scaled, scale)


class _ScaledLater:
    """A sum in ordinary memory; to wait for it scales it."""

    def __init__(self, pending: Pending, target: torch.Tensor, scale: float | Callable[[], float]) -> None:
        self._pending, self._target, self._scale = pending, target, scale

    def wait(self) -> None:
        """Wait, and scale."""
        self._pending.wait()
        self._target.mul_(self._scale if isinstance(self._scale, float) else self._scale())


class _Large:
    """A gradient that is a section of its own."""

    def __init__(self, section: int, start: int, numel: int) -> None:
        self.section, self._start, self._stop = section, start, start + numel
        self._sent: list[tuple[int, int, torch.Tensor]] = []

    def cut(self, flat: torch.Tensor, start: int, stop: int) -> None:
        """This rank sums elements `start` to `stop` of the bucket; the others are sent."""
        self._own = (start - self._start, stop - self._start)
        for low, high in ((self._start, start), (stop, self._stop)):
            if low < high:
                self._sent.append((low - self._start, high - self._start, flat[low:high]))

    def take(self, gradient: torch.Tensor) -> torch.Tensor:
        flat = gradient.detach().view(-1)
        for low, high, place in self._sent:
            place.copy_(flat[low:high])
        return flat[self._own[0] : self._own[1]]
