"""Collectives that have been started and not finished, in the order in which all ranks start them.

Nobody works for them in the background: what is in the line goes on when something is started, asked or waited for. So a rank
that has started a collective and looks after none keeps its peers waiting, as one that comes late does. In return no thread
takes a core from those who compute, and nothing waits inside a backward: a bucket is posted, and whoever finds one that all
have posted sums its slice. A process that waits for long in one line helps in its older ones, since its peers may wait there.
"""

import itertools
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from allstep.comm.shm.calls import pack
from allstep.comm.shm.peers import MOST_POSTED, Peers
from allstep.comm.shm.reduction import Blocks, multiply, own_slices
from allstep.comm.shm.staged import Staged
from allstep.comm.shm.waiting import IDLE

__all__ = ["Call", "Line", "Number", "Started", "SumInPlace"]

_AGES = itertools.count(1)
_FLOAT, _BITS = struct.Struct("<d"), struct.Struct("<q")


class Started:
    """A collective in the line."""

    __slots__ = ("is_done", "number")

    is_quick = False
    """Whether it needs of the others only that they have come, and not that they work on it at the same time."""

    number: int | None
    """Of the collective; None of one that is not posted before it runs."""

    def __init__(self, number: int | None) -> None:
        self.number, self.is_done = number, False

    def run(self) -> None:
        """Wait for the others, and do this rank's part."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until the others have done theirs."""


class Call(Started):
    """One that is done when it has run.

    Args:
        run: called with nothing.
        number: of the collective, where it has been posted.
    """

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[], None], number: int | None = None) -> None:
        super().__init__(number)
        self._run = run

    def run(self) -> None:
        self._run()


class Line:
    """Started collectives of some peers, first come first served."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._waiting: deque[Started] = deque()
        self._kept: deque[tuple[int, object]] = deque()  # memory that ranks which come late have still to read and write
        self._is_running = False
        self.age = peers.watch.age = next(_AGES)
        IDLE.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether something in it is not done."""
        return bool(self._waiting)

    def add(self, started: Started) -> None:
        """One more."""
        if len(self._waiting) >= MOST_POSTED:
            self._run_first()
        self._waiting.append(started)
        if self._kept:
            self._let_go()

    def keep(self, number: int, memory: object) -> None:
        """Hold `memory` until that collective is done on all ranks."""
        self._kept.append((number, memory))

    def _let_go(self) -> None:
        done = self._peers.done_by_all()
        while self._kept and self._kept[0][0] <= done:
            self._kept.popleft()

    def progress(self) -> None:
        """Do what needs no waiting."""
        waiting = self._waiting
        while waiting and waiting[0].is_quick and self._all_have_come(waiting[0]):
            self._run_first()

    def help(self) -> None:
        """Do what all have come to, while this process waits in a younger line: the others may wait here for this one."""
        waiting = self._waiting
        while waiting and not self._is_running and self._all_have_come(waiting[0]):
            self._run_first()

    def _all_have_come(self, started: Started) -> bool:
        return started.number is not None and self._peers.has_come(started.number)

    def finish(self, started: Started) -> None:
        """Return when it is done on all ranks, and with it those before it."""
        while not started.is_done:
            self._run_first()
        started.settle()
        self._let_go()

    def drain(self) -> None:
        """Do this rank's part of all: before a collective that is not in the line."""
        while self._waiting:
            self._run_first()

    def clear(self) -> None:
        """Forget them; the group ends."""
        self._waiting.clear()
        self._kept.clear()

    def _run_first(self) -> None:
        first, before = self._waiting.popleft(), self._is_running
        first.is_done = True  # also where it raises: the next one has to find its turn
        self._is_running = True
        try:
            first.run()
        finally:
            self._is_running = before


class SumInPlace:
    """All-reduces of one tensor that lies in shared memory; to be used again and again.

    Args:
        peers: the ranks.
        staged: what to do where another rank's tensor does not lie there.
        line: where they wait for each other.
        location: of this rank's tensor.
        dtype: of it.
        numel: of it.
        op: how values are combined.
        bounds: (0, ..., numel): in each section every rank sums a slice; all ranks must give the same.
    """

    def __init__(
        self,
        peers: Peers,
        staged: Staged,
        line: Line,
        location: int,
        dtype: torch.dtype,
        numel: int,
        op: Any = dist.ReduceOp.SUM,
        bounds: Sequence[int] | None = None,
    ) -> None:
        self.peers, self._staged, self.line = peers, staged, line
        self.location, self.dtype, self.numel, self.op = location, dtype, numel, op
        self.bounds = bounds or (0, numel)
        self.call = pack("all_reduce", dtype, numel, op)
        self._locations: list[int] = []
        self._blocks: Blocks | None = None

    def own_slices(self) -> list[tuple[int, int]]:
        """By section, first and last element of the slice that this rank sums."""
        return own_slices(self.bounds, self.dtype.itemsize, self.peers.size, self.peers.rank)

    def start(
        self,
        fresh: Mapping[int, torch.Tensor] | None = None,
        scale: float | Callable[[], float] = 1.0,
        scaled: int | None = None,
        kept: object = None,
    ) -> "StartedSum":
        """Post it; see `Blocks.reduce` for the arguments.

        A function `scale` is called when all ranks have come to this collective, and to those before it. `kept` is held until
        all are done: the others write into memory that must not be given back before.
        """
        started = StartedSum(self, fresh, scale, scaled, kept)
        self.line.add(started)
        self.line.progress()
        return started

    def run(self, number: int, fresh: Mapping[int, torch.Tensor] | None, scale: float, scaled: int | None) -> None:
        """This rank's part, when all have come."""
        peers = self.peers
        locations = peers.meet(number, self.call)
        if min(locations) < 0:
            self._go_staged(number, fresh, scale, scaled)
        else:
            if locations != self._locations or self._blocks is None:
                views = [peers.view(rank, at, self.dtype, self.numel) for rank, at in enumerate(locations)]
                self._blocks, self._locations = Blocks(views, peers.rank, self.bounds), locations
            self._blocks.reduce(self.op, fresh, scale, scaled)
        peers.done(number)

    def _go_staged(self, number: int, fresh: Mapping[int, torch.Tensor] | None, scale: float, scaled: int | None) -> None:
        """Where another rank's tensor does not lie in shared memory."""
        own = self.peers.view(self.peers.rank, self.location, self.dtype, self.numel)
        for section, values in (fresh or {}).items():
            start, stop = self.own_slices()[section]
            own[start:stop].copy_(values)
        self._staged.all_reduce(own, self.op, number, self.call)
        if scale != 1.0:
            multiply(own if scaled is None else own[: self.bounds[scaled]], scale)


class StartedSum(Started):
    """One of them, posted."""

    __slots__ = ("_fresh", "_kept", "_scale", "_scaled", "_sum")

    is_quick = True
    number: int

    def __init__(
        self,
        sum_in_place: SumInPlace,
        fresh: Mapping[int, torch.Tensor] | None,
        scale: float | Callable[[], float],
        scaled: int | None,
        kept: object,
    ) -> None:
        super().__init__(sum_in_place.peers.post(sum_in_place.call, sum_in_place.location))
        self._sum, self._fresh, self._scale, self._scaled = sum_in_place, fresh, scale, scaled
        self._kept = kept

    def run(self) -> None:
        fresh, self._fresh = self._fresh, None
        scale = self._scale if isinstance(self._scale, float) else self._scale()
        self._sum.run(self.number, fresh, scale, self._scaled)
        self._sum.line.keep(self.number, self._kept)
        self._kept = None

    def settle(self) -> None:
        self._sum.peers.all_done(self.number, self._sum.call)

    def wait(self) -> None:
        """Return when the sum may be read."""
        self._sum.line.finish(self)


class Number(Started):
    """A number that every rank posts, and that all can read when all have come: at no wait of its own."""

    __slots__ = ("_call", "_line", "_numbers", "_peers")

    is_quick = True
    number: int

    def __init__(self, peers: Peers, line: Line, value: float) -> None:
        self._peers, self._line, self._call = peers, line, pack("number", torch.float64, 0)
        super().__init__(peers.post(self._call, _BITS.unpack(_FLOAT.pack(value))[0]))
        line.add(self)

    def run(self) -> None:
        bits = self._peers.meet(self.number, self._call)
        self._numbers = [_FLOAT.unpack(_BITS.pack(each))[0] for each in bits]
        self._peers.done(self.number)

    def values(self) -> list[float]:
        """By rank, what each has posted."""
        if not self.is_done:
            self._line.finish(self)
        return self._numbers
