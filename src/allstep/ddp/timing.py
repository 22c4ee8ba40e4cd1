"""What a bucket plan is made from: when gradients become ready, and what a collective costs on this transport."""

import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from allstep.comm.communicator import Communicator
from allstep.ddp.plan import TransferCost

__all__ = ["Backward", "ReadyTimes", "fit_cost", "hidden_share", "measure_cost", "slowest"]

_ROUNDS = 7  # of each collective that is timed; the first one, which may have connections and memory to make, does not count
_SIZES = {"cpu": (32 << 10, 256 << 10, 2 << 20, 8 << 20)}
_SIZES_ELSEWHERE = (64 << 10, 512 << 10, 4 << 20, 16 << 20)
_DEAR = 1.5  # a size whose bytes cost more than this many times the cheapest is not worth merging up to

_LEAST_OVERLAP = 0.1  # with none at all it would be open when the last bucket ends


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Times of a backward, in seconds from its start."""

    ready: tuple[float | None, ...]
    """By parameter, when its gradient was there; None where none came."""
    end: float
    """When all of it was done, before the wait for collectives."""


class ReadyTimes:
    """Notes when gradients come, over a few backwards: a clock is read for each, on accelerators an event recorded.

    Args:
        parameters: how many there are.
        device: where gradients are computed; elsewhere than on the CPU the time of the device counts, not that of the host.
    """

    def __init__(self, parameters: int, device: torch.device) -> None:
        self._now, self._seconds = _clock_of(device)
        self._empty: list[Any] = [None] * parameters
        self._marks = self._empty.copy()
        self._start: Any = None
        self._backwards: list[tuple[Any, list[Any], Any]] = []

    def begin(self) -> None:
        """A backward starts."""
        self._marks = self._empty.copy()
        self._start = self._now()

    def note(self, index: int) -> None:
        """A gradient is there; of one that comes in parts, the last time counts."""
        self._marks[index] = self._now()

    def end(self) -> None:
        """The backward is through; one that was not begun, of a rank that only took part, does not count."""
        if self._start is not None:
            self._backwards.append((self._start, self._marks, self._now()))
            self._start = None

    def backward(self) -> Backward | None:
        """The fastest backward, which was disturbed least, without the very first; None where none was timed.

        Of a gradient that did not come in it, the time in another one. On accelerators it waits for the last backward.
        """
        timed = [
            Backward(
                ready=tuple(None if mark is None else self._seconds(start, mark) for mark in marks),
                end=self._seconds(start, end),
            )
            for start, marks, end in self._backwards[1:] or self._backwards
        ]
        if not timed:
            return None
        timed.sort(key=lambda each: each.end)
        end, ready = timed[0].end, []
        for times in zip(*(each.ready for each in timed), strict=True):
            came = [min(time, end) for time in times if time is not None]
            ready.append(came[0] if came else None)
        return Backward(ready=tuple(ready), end=end)


def slowest(backwards: Iterable[Backward | None]) -> Backward | None:
    """The times that all ranks can rely on: by gradient, that of the last rank that had it. None where no rank timed any."""
    timed = [each for each in backwards if each is not None]
    if not timed:
        return None
    ready = []
    for times in zip(*(each.ready for each in timed), strict=True):
        came = [time for time in times if time is not None]
        ready.append(max(came) if came else None)
    return Backward(ready=tuple(ready), end=max(each.end for each in timed))


def fit_cost(samples: Sequence[tuple[int, float]], *, launches: Sequence[float] = (0.0,), overlap: float = 1.0) -> TransferCost:
    """Fit what a collective costs to measurements, of which many may have been disturbed.

    Neighbours on a machine make a collective slower, never faster. So of each size the lower quartile counts, and it is the
    same whatever happens to a half of its samples. Through those, a line with the least squares of relative errors.

    Args:
        samples: bytes, and seconds from the start on the last rank until the end. At least one.
        launches: seconds that starting one took.
        overlap: share of a collective that costs a computation beside it nothing.
    """
    of_size: dict[int, list[float]] = {}
    for nbytes, seconds in samples:
        of_size.setdefault(nbytes, []).append(seconds)
    points = sorted((nbytes, max(_lower_quartile(times), 1e-9)) for nbytes, times in of_size.items())
    cheapest = min(seconds / nbytes for nbytes, seconds in points)
    last = max(at for at, (nbytes, seconds) in enumerate(points) if seconds / nbytes <= _DEAR * cheapest)
    latency, per_byte = _line(points[: last + 1])
    # between a size and a dearer one, or somewhat above the largest one: further than that no line reaches
    largest = math.isqrt(points[last][0] * points[last + 1][0]) if last + 1 < len(points) else 2 * points[last][0]
    return TransferCost(
        latency=latency,
        per_byte=per_byte,
        launch=_lower_quartile(launches),
        overlap=overlap,
        largest=largest,
    )


def hidden_share(seconds: float, thread: float, process: float, *, has_spare_cores: bool) -> float:
    """Share of collectives that costs a backward beside them nothing, from the processor time that they took on a rank.

    Processor time, unlike seconds, does not grow where neighbours use the machine.

    Args:
        seconds: that the collectives took.
        thread: processor time of the thread that started them and waited, which is the one that runs backward.
        process: processor time of all threads of the rank.
        has_spare_cores: whether other threads find a core that backward does not use.
    """
    taken = thread if has_spare_cores else max(thread, process)
    return min(1.0, max(_LEAST_OVERLAP, 1.0 - taken / seconds))


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope, none below zero, with the least sum of `(1 - (intercept + slope x) / y) ** 2`."""
    weights = [1 / y**2 for _, y in points]
    whole = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / whole
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / whole
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if not spread:
        return mean_y, 0.0
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    if slope < 0:
        return mean_y, 0.0
    if mean_y < slope * mean_x:
        products, squares = zip(*((w * x * y, w * x * x) for w, (x, y) in zip(weights, points, strict=True)), strict=True)
        return 0.0, sum(products) / sum(squares)
    return mean_y - slope * mean_x, slope


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]


def measure_cost(communicator: Communicator, nbytes: int, dtype: torch.dtype, device: torch.device) -> TransferCost:
    """Collective. Time all-reduces of several sizes; the same answer on every rank.

    From the start of a collective in a training step until the wait for it is over is not what it costs: a rank that comes
    early waits for the others. So ranks start together, after a barrier, and of each collective the shortest time over ranks
    counts: that of the rank that came last.

    On the CPU what collectives take from backward is their processor time. Of accelerators, which have streams of their own for
    them, it is taken to be nothing but the launch.

    Args:
        communicator: the line that buckets use.
        nbytes: bytes of all gradients; no collective of more is timed.
        dtype: of most gradients.
        device: where they are.
    """
    sizes = sorted({max(dtype.itemsize, min(size, nbytes)) for size in _SIZES.get(device.type, _SIZES_ELSEWHERE)})
    memory = communicator.allocate(sizes[-1] // dtype.itemsize, dtype, device)
    own = [_timed(communicator, memory[: size // dtype.itemsize], size, device) for _ in range(_ROUNDS) for size in sizes]
    everyone: list[tuple[_Place, list[_Timed]]] = communicator.all_gather_object((_place(), own[len(sizes) :]))
    rounds = [*zip(*(timed for _, timed in everyone), strict=True)]
    samples = [(each[0].nbytes, min(timed.seconds for timed in each)) for each in rounds]
    overlap = 1.0
    if device.type == "cpu":
        least = {size: _lower_quartile([seconds for nbytes, seconds in samples if nbytes == size]) for size in sizes}
        seconds = sum(least[nbytes] for nbytes, _ in samples)
        spare = _have_spare_cores([place for place, _ in everyone])
        overlap = min(
            hidden_share(seconds, sum(t.thread for t in timed), sum(t.process for t in timed), has_spare_cores=spare)
            for _, timed in everyone
        )
    return fit_cost(samples, launches=[timed.launch for each in rounds for timed in each], overlap=overlap)


class _Timed(NamedTuple):
    """One collective on one rank."""

    nbytes: int
    launch: float
    """Seconds until it was started."""
    seconds: float
    """Until it was done."""
    thread: float
    """Processor time of this thread."""
    process: float
    """Processor time of all threads."""


def _timed(communicator: Communicator, tensor: torch.Tensor, nbytes: int, device: torch.device) -> _Timed:
    """Collective."""
    communicator.barrier()
    thread, process, start = time.thread_time(), time.process_time(), time.perf_counter()
    pending = communicator.all_reduce(tensor)
    launch = time.perf_counter() - start
    pending.wait()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    seconds = time.perf_counter() - start
    return _Timed(nbytes, launch, seconds, time.thread_time() - thread, time.process_time() - process)


class _Place(NamedTuple):
    """Where a rank computes."""

    host: str
    cores: frozenset[int]
    threads: int


def _place() -> _Place:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return _Place(platform.node(), frozenset(cores), torch.get_num_threads())


def _have_spare_cores(places: Sequence[_Place]) -> bool:
    """Whether each rank of each host finds a core for a thread more than those that compute."""
    for host in {place.host for place in places}:
        here = [place for place in places if place.host == host]
        if len(frozenset().union(*(place.cores for place in here))) < sum(place.threads + 1 for place in here):
            return False
    return True


def _clock_of(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """What marks a moment, and what gives the seconds between two marks."""
    if device.type == "cpu":
        return time.perf_counter, lambda start, end: float(end - start)

    def mark() -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    def seconds(start: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    return mark, seconds
