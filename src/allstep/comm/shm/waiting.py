"""Waiting for a number in shared memory to grow: spin, then give the core away, then sleep; and never for ever."""

import operator
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from allstep.comm.shm import futex
from allstep.comm.shm.calls import describe
from allstep.errors import CollectiveError

__all__ = ["IDLE", "LEFT", "SLEEPERS", "Watch"]

LEFT = 8
"""Word of a rank's counters that is 1 when it has left."""

SLEEPERS = 1
"""Words behind a counter: 1 where somebody sleeps until that counter changes."""

_YIELDING = 0.004
"""Seconds to hand the core to whoever wants it before sleeping: a wake-up costs more."""
_YIELDING_CROWDED = 0.0003
"""The same where there are more ranks than cores, and who yields may get the core back before the one that is waited for."""
_NAP = 0.02
"""Seconds to sleep at most before looking again."""
_ALONE = 0.001
"""Seconds to wait before looking at other lines."""
_BETWEEN_LOOKS = 0.2
"""Seconds between two looks at whether the others live."""


class Helper(Protocol):
    """What can use the time of a process that waits."""

    age: int
    """Its number in the order in which all ranks have made theirs."""

    def help(self) -> None:
        """Do what all ranks have come to."""


_AGE = operator.attrgetter("age")

IDLE: "weakref.WeakSet[Helper]" = weakref.WeakSet()
"""All that this process can do while it waits."""


class Watch:
    """Waits for the counters of other ranks.

    Args:
        rank: who waits.
        counters: by rank, its counters: (words,) 64-bit integers in shared memory.
        addresses: by rank, where those lie in this process.
        pids: by rank, its process.
        timeout: seconds that a wait may take; asked for at each long one.
    """

    def __init__(
        self,
        rank: int,
        counters: Sequence[memoryview],
        addresses: Sequence[int],
        pids: Sequence[int],
        timeout: Callable[[], float],
    ) -> None:
        self._rank, self._addresses, self._pids, self._timeout = rank, addresses, pids, timeout
        self._others = [(other, cells) for other, cells in enumerate(counters) if other != rank]
        self.age = 0
        """That of the line that waits here."""
        self._processes: dict[int, int] = {}  # descriptor -> rank
        self._poll = select.poll()
        for other, _ in self._others:
            fd = os.pidfd_open(pids[other])
            self._processes[fd] = other
            self._poll.register(fd, select.POLLIN)
        # with a core for each rank, what is waited for comes in a moment; otherwise it needs this core
        is_crowded = len(pids) > len(os.sched_getaffinity(0))
        self._spins, self._yielding = (2, _YIELDING_CROWDED) if is_crowded else (100, _YIELDING)

    def wait(self, word: int, value: int, call: int) -> None:
        """Return when that word of every other rank is at least `value`.

        Raises:
            CollectiveError: a rank has died or left, or the timeout ran out; `call` is what it runs.
        """
        for other, cells in self._others:
            if cells[word] < value:
                self._wait_for(other, cells, word, value, call)

    def _wait_for(self, other: int, cells: memoryview, word: int, value: int, call: int) -> None:
        for _ in range(self._spins):
            if cells[word] >= value:
                return
        began = looked = now = time.monotonic()
        while cells[word] < value:
            if now - began < self._yielding:
                for _ in range(8):
                    os.sched_yield()
                    if cells[word] >= value:
                        return
            else:
                self._sleep(other, cells, word, value)
            now = time.monotonic()
            if now - began > _ALONE:
                self._help()
            if now - looked > _BETWEEN_LOOKS:
                looked = now
                self._look(other, cells, word, value, call, now - began)

    def _sleep(self, other: int, cells: memoryview, word: int, value: int) -> None:
        """Until that word changes; see `tell`. A wake-up that is lost, as the two cross, costs one nap."""
        cells[word + SLEEPERS] = 1
        seen = cells[word]
        if seen < value:
            futex.wait(self._addresses[other] + 8 * word, seen, _NAP)

    def _help(self) -> None:
        """Only in lines that were made earlier: two ranks that helped in each other's line would wait for one another there."""
        for line in sorted(IDLE, key=_AGE):
            if line.age < self.age:
                line.help()

    def _look(self, other: int, cells: memoryview, word: int, value: int, call: int, waited: float) -> None:
        dead = sorted(self._processes[fd] for fd, _ in self._poll.poll(0))
        if cells[word] >= value:
            return  # it came here first
        broke = f"Rank {self._rank} of {len(self._pids)}: {describe(call)} broke off:"
        if dead:
            who = ", ".join(f"rank {rank} (process {self._pids[rank]})" for rank in dead)
            raise CollectiveError(f"{broke} {who} has ended without leaving the group; what was printed there says why.")
        if cells[LEFT]:
            raise CollectiveError(
                f"{broke} rank {other} has left the group. All ranks must run the same collectives before they leave."
            )
        if waited > self._timeout():
            raise CollectiveError(
                f"{broke} rank {other} did not come to it within the timeout of {self._timeout():g} s. It lives (process "
                f"{self._pids[other]}), but is late, or runs something else. Where it is only slow, raise the timeout "
                f"(ddp_timeout)."
            )

    def close(self) -> None:
        """Stop looking at the others."""
        for fd in self._processes:
            os.close(fd)
        self._processes.clear()
