"""The ranks of one host, and the memory that they share: how they find each other, count together, and hand out tensors.

Each rank owns one control segment that all others map. Only its owner writes its numbers:

    token     proves that the right memory was mapped
    left      1 when the rank has left
    posted    number of the last collective that this rank has come to
    done      number of the last one in which it reads and writes nothing more
    turn      steps of staged collectives that it has taken, since the start
    table     the segments that it has allocated: generation, descriptor, inode, size
    calls     what its last collectives were, by number: kind, sizes, and where its tensor lies
    staging   where it lays copies of tensors that do not lie in shared memory

Numbers only grow. A plain store of eight bytes is seen whole, and after what was written before it (x86-64).
"""

import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from allstep.comm.shm import futex
from allstep.comm.shm.calls import describe
from allstep.comm.shm.host import host_key, why_not_here
from allstep.comm.shm.segments import Address, Segment, map_segment
from allstep.comm.shm.waiting import LEFT, SLEEPERS, Watch
from allstep.errors import CollectiveError

__all__ = ["Offer", "Peers"]

TOKEN, POSTED, DONE, TURN = 0, 16, 24, 32  # a cache line each
_TABLE, _SEGMENTS = 64, 64
CALLS, REMEMBERED = _TABLE + 4 * _SEGMENTS, 1024
_STAGING = 5 * 4096  # bytes
assert 8 * (CALLS + 2 * REMEMBERED) <= _STAGING

SMALL = 64 << 10
"""Bytes of a tensor that all ranks copy and sum whole, at one wait."""
STAGED = 3 << 20
"""Bytes of each rank's staging memory for larger ones."""
MOST_POSTED = REMEMBERED // 2
"""Collectives that may be posted and not done: others may not have read the calls of those before yet."""

PRIVATE, COPIED = -1, -2
"""Location of a tensor that is not in shared memory; and of one whose copy is where small ones are left."""


class Offer:
    """What a rank tells the others before they share memory: who it is, and where its control segment lies."""

    def __init__(self) -> None:
        self.segment: Segment | None = None
        refusal = why_not_here()
        if not refusal:
            try:
                self.segment = Segment(_STAGING + 2 * SMALL + STAGED)
            except OSError as error:
                refusal = str(error)
        self.told: dict[str, Any] = {"refusal": refusal}
        """For the others; goes through JSON."""
        if self.segment is not None:
            token = secrets.randbits(62)
            self.segment.words()[TOKEN] = token
            self.told = {"refusal": "", "host": host_key(), "token": token, **asdict(self.segment.address)}


class Peers:
    """Ranks of one host that share memory.

    Args:
        rank: this one's number among them.
        offer: what it has told the others.
        told: by rank, what each has told; all of one host.
        timeout: seconds that any wait may take; asked for when one is long.

    Raises:
        OSError: the memory of another rank cannot be mapped.
    """

    def __init__(self, rank: int, offer: Offer, told: Sequence[dict[str, Any]], timeout: Callable[[], float]) -> None:
        assert offer.segment is not None
        self.rank, self.size = rank, len(told)
        self._control = offer.segment
        memories: list[Any] = []
        for other, each in enumerate(told):
            address = Address(each["pid"], each["fd"], each["inode"], each["nbytes"])
            memories.append(self._control.memory if other == rank else map_segment(address))
        self.cells = [memoryview(memory).cast("q") for memory in memories]
        """By rank, its numbers."""
        if any(cells[TOKEN] != each["token"] for cells, each in zip(self.cells, told, strict=True)):
            raise OSError("another process's memory was found where a rank's should be")
        bytes_of = [torch.frombuffer(memory, dtype=torch.uint8)[_STAGING:] for memory in memories]
        self.small = [[each[turn * SMALL : (turn + 1) * SMALL] for each in bytes_of] for turn in (0, 1)]
        """For odd and even collectives: by rank, (SMALL,) bytes that it copies small tensors to."""
        self.staging = [each[2 * SMALL :] for each in bytes_of]
        """By rank, (STAGED,) bytes."""
        self.own = self.cells[rank]
        self._pids = [each["pid"] for each in told]
        addresses = [torch.frombuffer(memory, dtype=torch.uint8).data_ptr() for memory in memories]
        self._address = addresses[rank]
        self.watch = Watch(rank, self.cells, addresses, self._pids, timeout)
        self.posted = 0
        """Number of the last collective that this rank has come to."""
        self.turn = 0
        """Steps of staged collectives taken since the start; equal on all ranks between collectives."""
        self._segments: dict[int, tuple[int, int]] = {}  # index -> first and last address of what this rank has allocated
        self._mapped: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}  # (rank, index) -> generation, bytes
        self.forget: list[weakref.WeakMethod[Callable[[int], None]]] = []
        """Called with the index of each segment of this rank that is gone."""

    def close_control(self) -> None:
        """All have mapped this rank's control segment."""
        self._control.close()

    # ---- collectives

    def tell(self, word: int, value: int) -> None:
        """Let a counter of this rank grow, and wake those who sleep until it does."""
        own = self.own
        own[word] = value
        if own[word + SLEEPERS]:
            own[word + SLEEPERS] = 0
            futex.wake(self._address + 8 * word)

    def post(self, call: int, location: int = PRIVATE) -> int:
        """Say that this rank has come to its next collective; returns the number of that.

        Args:
            call: which it is.
            location: where the tensor lies, or another number that the others need.
        """
        self.posted = number = self.posted + 1
        at = CALLS + 2 * (number % REMEMBERED)
        self.own[at], self.own[at + 1] = call, location
        self.tell(POSTED, number)
        return number

    def has_come(self, number: int) -> bool:
        """Whether all ranks have come to a collective."""
        return min([cells[POSTED] for cells in self.cells]) >= number

    def meet(self, number: int, call: int) -> list[int]:
        """Wait until all have come to a collective; by rank, the locations that they gave.

        Raises:
            CollectiveError: a rank runs another one, or did not come.
        """
        at = CALLS + 2 * (number % REMEMBERED)
        self.watch.wait(POSTED, number, call)
        for cells in self.cells:
            if cells[at] != call:
                self.done(number)
                raise CollectiveError(self._mismatch(number))
        return [cells[at + 1] for cells in self.cells]

    def _mismatch(self, number: int) -> str:
        at = CALLS + 2 * (number % REMEMBERED)
        calls = "; ".join(f"rank {rank}: {describe(cells[at])}" for rank, cells in enumerate(self.cells))
        return (
            f"Rank {self.rank} of {self.size}: the ranks do not run the same collective (number {number}): {calls}. "
            f"All ranks must run the same collectives, on tensors of the same size and dtype, in the same order."
        )

    def done(self, number: int) -> None:
        """This rank reads and writes nothing more for that collective and those before it."""
        self.tell(DONE, number)

    def done_by_all(self) -> int:
        """Number of the last collective that all ranks are done with."""
        return min([cells[DONE] for cells in self.cells])

    def all_done(self, number: int, call: int) -> None:
        """Wait until that holds for all."""
        self.watch.wait(DONE, number, call)

    # ---- memory

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """(numel,) zeros in shared memory; None where there are too many segments already.

        Raises:
            OSError: the system has not so much memory.
        """
        index = next((i for i in range(_SEGMENTS) if i not in self._segments), None)
        if index is None:
            return None
        segment = Segment(numel * dtype.itemsize, reserve=True)
        tensor = torch.frombuffer(segment.memory, dtype=dtype, count=numel)
        at = _TABLE + 4 * index
        address = segment.address
        self.own[at] += 1
        self.own[at + 1], self.own[at + 2], self.own[at + 3] = address.fd, address.inode, address.nbytes
        self._segments[index] = (tensor.data_ptr(), tensor.data_ptr() + numel * dtype.itemsize)
        weakref.finalize(segment.memory, _gone, weakref.ref(self), index, address.fd, os.getpid()).atexit = False
        return tensor

    def gone(self, index: int) -> None:
        """The last tensor on a segment of this rank is gone."""
        self._segments.pop(index, None)
        self._mapped.pop((self.rank, index), None)
        self.own[_TABLE + 4 * index] += 1
        for weak in self.forget:
            forget = weak()
            if forget is not None:
                forget(index)

    def _sweep(self) -> None:
        """Let go of the segments that other ranks have let go of."""
        for (rank, index), (generation, _) in list(self._mapped.items()):
            if self.cells[rank][_TABLE + 4 * index] != generation:
                del self._mapped[rank, index]

    def locate(self, tensor: torch.Tensor) -> int:
        """Where a contiguous tensor lies among what this rank has allocated, as the others can find it; else `PRIVATE`."""
        address = tensor.data_ptr()
        for index, (low, high) in list(self._segments.items()):  # a finalizer may take one out meanwhile
            if low <= address < high:
                return (index << 16 | self.own[_TABLE + 4 * index] & 0xFFFF) << 40 | (address - low)
        return PRIVATE

    def view(self, rank: int, location: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """(numel,): what lies at that location of that rank. It does not keep the memory from being given back.

        Raises:
            CollectiveError: it has been given back already, or cannot be mapped.
        """
        index, offset = location >> 56, location & ((1 << 40) - 1)
        at = _TABLE + 4 * index
        generation, fd, inode, nbytes = self.cells[rank][at : at + 4].tolist()
        if generation & 0xFFFF != location >> 40 & 0xFFFF:
            raise CollectiveError(
                f"Rank {self.rank} of {self.size}: rank {rank} let go of a tensor while it was being summed. Keep it until the "
                f"work that all_reduce returned has been waited for."
            )
        held = self._mapped.get((rank, index))
        if held is None or held[0] != generation:
            try:
                memory = map_segment(Address(self._pids[rank], fd, inode, nbytes))
            except OSError as error:
                raise CollectiveError(
                    f"Rank {self.rank} of {self.size} cannot map the memory of rank {rank}: {error}. Start the job again with "
                    f"the backend gloo (ddp_backend='gloo') where this does not go away."
                ) from error
            self._sweep()  # a new one often comes in place of an old one (test_shm_faults.py)
            self._mapped[rank, index] = held = (generation, torch.frombuffer(memory, dtype=torch.uint8))
        return held[1][offset : offset + numel * dtype.itemsize].view(dtype)

    def leave(self) -> None:
        """Tell the others, and let go of their memory."""
        with suppress(ValueError):
            self.own[LEFT] = 1
        self.watch.close()
        self._control.close()
        self._mapped.clear()
        self.forget.clear()


def _gone(peers: "weakref.ref[Peers]", index: int, fd: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked process has let go of its copy
    os.close(fd)
    living = peers()
    if living is not None:
        living.gone(index)
