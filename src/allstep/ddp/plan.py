"""Where buckets are cut, so that a step waits least for its last collective. Pure: measurements in, `BucketPlan` out.

The model: gradients become ready one after the other; a bucket may be sent when all of its gradients are ready; collectives
run one after the other on one link, and one of n bytes takes `latency + per_byte * n` seconds. Many small buckets start early
but pay the latency often; large ones start late. To merge gradients so that the last collective ends earliest is
merged-gradient wait-free backpropagation (Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous
SGD Algorithms", INFOCOM 2019). Theirs merges greedily; here the optimum is found by dynamic programming, which a test compares
with all plans.

Two more costs decide how many buckets are worth it: a collective takes time from the thread that runs backward, and where it
runs on the same cores, only a part of it is hidden at all (`TransferCost.overlap`).
"""

import math
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

__all__ = ["BucketPlan", "TransferCost", "expected_end", "plan_cuts"]

MIB = 1 << 20
_ROUNDING = 1e-12  # relative, or in seconds
_DOUBTS = (0.75, 1.0, 1.5)  # how many times slower than measured a link may turn out to be


@dataclass(frozen=True, kw_only=True)
class TransferCost:
    """What a collective costs, from its start on all ranks until its result is there on all."""

    latency: float
    """Seconds of each, whatever its size."""
    per_byte: float
    """Seconds of each byte more."""
    launch: float = 0.0
    """Seconds that starting one takes from the thread that runs backward."""
    overlap: float = 1.0
    """Share of a collective that costs backward nothing while both run: 1 on a link of its own, 0 where one thread does all."""
    largest: int = sys.maxsize
    """Bytes above which each byte costs more, as where they no longer fit the cache: none are merged into a larger bucket."""

    def of(self, nbytes: float) -> float:
        """Seconds of a collective of `nbytes`."""
        return self.latency + self.per_byte * nbytes

    def slower(self, factor: float) -> "TransferCost":
        """The same on a link that takes `factor` times as long."""
        return replace(self, latency=factor * self.latency, per_byte=factor * self.per_byte)

    @property
    def each(self) -> float:
        """Seconds by which one collective more makes a step longer, even where it ends before backward does."""
        return self.launch + (1.0 - self.overlap) * self.latency

    def __str__(self) -> str:
        speed = f"{1e-9 / self.per_byte:.3g} GB/s" if self.per_byte > 0 else "no cost a byte"
        return f"latency {_ms(self.latency)}, {speed}, {self.overlap:.0%} of it beside backward"


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Where to cut, and what is expected of it."""

    cuts: tuple[int, ...]
    """How many gradients, in ready order, lie before each cut, ascending; there is one bucket more than cuts."""
    sizes: tuple[int, ...]
    """Bytes of each bucket."""
    cost: TransferCost
    """What was measured of the transport."""
    backward: float
    """Seconds of a backward."""
    end: float
    """Seconds from the start of backward until the last collective has ended, as the model has it."""
    one_bucket_end: float
    """The same with everything in one bucket."""
    before_end: float | None = None
    """The same with the buckets of before; None where those were not told."""

    @property
    def buckets(self) -> int:
        """How many."""
        return len(self.sizes)

    @property
    def exposed(self) -> float:
        """Seconds after backward in which a step waits for collectives."""
        return max(0.0, self.end - self.backward)

    @property
    def one_bucket_exposed(self) -> float:
        """The same with everything in one bucket."""
        return max(0.0, self.one_bucket_end - self.backward)

    @property
    def before_exposed(self) -> float | None:
        """The same with the buckets of before."""
        return None if self.before_end is None else max(0.0, self.before_end - self.backward)

    def __str__(self) -> str:
        many = f"{self.buckets} buckets" if self.buckets > 1 else "1 bucket"
        spread = f" of {min(self.sizes) / MIB:.3g} to {max(self.sizes) / MIB:.3g}" if self.buckets > 1 else ""
        dear = f", dearer above {self.cost.largest / MIB:.3g} MiB" if self.cost.largest < sum(self.sizes) else ""
        before = "" if self.before_exposed is None else f", the buckets of before {_ms(self.before_exposed)}"
        return (
            f"{many} for {sum(self.sizes) / MIB:.3g} MiB of gradients{spread and spread + ' MiB'}: {self._reason()}.\n"
            f"Measured: {self.cost}{dear}; a collective takes {_ms(self.cost.each)} from backward.\n"
            f"Backward {_ms(self.backward)}; expected exposed {_ms(self.exposed)}, one bucket would expose "
            f"{_ms(self.one_bucket_exposed)}{before}."
        )

    def _reason(self) -> str:
        if self.buckets == 1:
            return "more would cost more than they hide"
        if self.end <= self.backward:
            return "all of it hides behind backward"
        if self.cost.overlap <= 0:
            return "nothing is hidden, and larger ones cost more a byte"
        return "more would cost more than they hide"


def expected_end(ready: Sequence[float], nbytes: Sequence[int], cuts: Sequence[int], cost: TransferCost) -> float:
    """Seconds from the start of backward until the last collective has ended. Arguments as in `plan_cuts`."""
    return _end(_available(ready), _sums(nbytes), cuts, cost)


def plan_cuts(
    ready: Sequence[float],
    nbytes: Sequence[int],
    cost: TransferCost,
    end: float,
    *,
    slack: float = 0.0,
    before_end: float | None = None,
) -> BucketPlan:
    """Cut gradients into buckets so that a step with their collectives takes least; of equal plans the one with fewest buckets.

    What is least: `overlap * max(E, end) + K * each` with E when the last of K collectives ends and the cost's `overlap` and
    `each`; on a link of its own that costs the host nothing, E alone. Exact. With n gradients and a best plan of K buckets it
    takes O(n K) steps: 2000 gradients are planned in well under a second.

    Fewest buckets have a price where the measurement was wrong: they leave as late as the model allows. `slack` buys a plan
    that does well on a somewhat faster and a much slower link too.

    Args:
        ready: seconds from the start of backward until each gradient is ready, in the order in which buckets take them.
        nbytes: bytes of each.
        cost: what a collective costs.
        end: seconds of the whole backward.
        slack: seconds that the plan may be worse than the best one; 0 gives that.
        before_end: what `expected_end` gives for the buckets of before, to be compared in words.

    Raises:
        ValueError: there is no gradient, or not as many times as sizes.
    """
    if not ready or len(ready) != len(nbytes):
        raise ValueError(f"{len(ready)} ready times and {len(nbytes)} sizes: expected equally many, and at least one.")
    available, sums = _available(ready), _sums(nbytes)
    end = max(end, available[-1])
    cuts = _best(_plans(available, sums, cost, end), available, sums, cost, end)
    if slack > 0:
        cuts = _robust(cuts, available, sums, cost, end, slack)
    return BucketPlan(
        cuts=cuts,
        sizes=tuple(sums[last] - sums[first] for first, last in pairwise([0, *cuts, len(ready)])),
        cost=cost,
        backward=end,
        end=_end(available, sums, cuts, cost),
        one_bucket_end=_end(available, sums, (), cost),
        before_end=before_end,
    )


def _available(ready: Sequence[float]) -> list[float]:
    """When each gradient can go: not before those in front of it."""
    return [*accumulate((max(0.0, time) for time in ready), max)]


def _sums(nbytes: Sequence[int]) -> list[int]:
    """Bytes before each place."""
    return [0, *accumulate(nbytes)]


def _end(available: Sequence[float], sums: Sequence[int], cuts: Sequence[int], cost: TransferCost) -> float:
    free = 0.0
    for first, last in pairwise([0, *cuts, len(available)]):
        free = max(free, available[last - 1]) + cost.of(sums[last] - sums[first])
    return free


def _step(available: Sequence[float], sums: Sequence[int], cuts: Sequence[int], cost: TransferCost, end: float) -> float:
    """What a plan is judged by; see `plan_cuts`."""
    return cost.overlap * max(_end(available, sums, cuts, cost), end) + (len(cuts) + 1) * cost.each


def _best(
    plans: Sequence[tuple[int, ...]], available: Sequence[float], sums: Sequence[int], cost: TransferCost, end: float
) -> tuple[int, ...]:
    """The first of those that take least."""
    steps = [_step(available, sums, cuts, cost, end) for cuts in plans]
    return plans[next(at for at, step in enumerate(steps) if step <= min(steps) + _ROUNDING * max(1.0, min(steps)))]


def _robust(
    best: tuple[int, ...], available: Sequence[float], sums: Sequence[int], cost: TransferCost, end: float, slack: float
) -> tuple[int, ...]:
    """Of plans that are at most `slack` worse than the best one: that which takes least on links that may be others."""
    doubted = [cost.slower(factor) for factor in _DOUBTS]
    candidates = {best}
    for doubt in doubted:
        plans = _plans(available, sums, doubt, end)
        its_best = _best(plans, available, sums, doubt, end)
        candidates |= {*plans, tuple(sorted({*best, *its_best}))}
    limit = _step(available, sums, best, cost, end) + slack

    def doubtful(cuts: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        return sum(_step(available, sums, cuts, doubt, end) for doubt in doubted), len(cuts), cuts

    def allowed(plans: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [
            cuts
            for cuts in plans
            if _step(available, sums, cuts, cost, end) <= limit and not _has_merged_beyond(cost.largest, sums, cuts)
        ]

    chosen = min(allowed(candidates), key=doubtful)
    while True:  # two plans put together have cuts that neither needs
        fewer = allowed(chosen[:at] + chosen[at + 1 :] for at in range(len(chosen)))
        if not fewer or min(map(doubtful, fewer)) > doubtful(chosen):
            return chosen
        chosen = min(fewer, key=doubtful)


def _has_merged_beyond(largest: int, sums: Sequence[int], cuts: Sequence[int]) -> bool:
    return any(last - first > 1 and sums[last] - sums[first] > largest for first, last in pairwise([0, *cuts, len(sums) - 1]))


def _plans(available: Sequence[float], sums: Sequence[int], cost: TransferCost, end: float) -> list[tuple[int, ...]]:
    """The cuts of the plans that end earliest with one bucket, two, and so on, for as long as one more can pay."""
    unlimited: list[float] = []
    _earliest_ends(unlimited, unlimited, available, sums, cost)  # with as many buckets as one likes
    least = cost.overlap * max(unlimited[-1], end)
    ends = [0.0, *[math.inf] * len(available)]  # with no bucket at all
    choices: list[list[int]] = []
    plans = []
    best = math.inf
    for count in range(1, len(available) + 1):
        if least + count * cost.each >= best - _ROUNDING * max(1.0, least):
            break
        before, ends = ends, []
        choices.append(_earliest_ends(ends, before, available, sums, cost))
        if ends[-1] < math.inf:
            best = min(best, cost.overlap * max(ends[-1], end) + count * cost.each)
            plans.append(_cuts(choices))
    return plans


def _cuts(choices: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The way back through the choices, from the last gradient."""
    cuts, at = [], len(choices[-1]) - 1
    for choice in reversed(choices):
        at = choice[at]
        if not at:
            break
        cuts.append(at)
    return tuple(reversed(cuts))


def _earliest_ends(
    ends: list[float], before: Sequence[float], ready: Sequence[float], sums: Sequence[int], cost: TransferCost
) -> list[int]:
    """Append to `ends`, for each j, when the first j gradients can be through with one bucket more than in `before`.

    Returns, for each j, how many gradients go before its last bucket. `before` may be `ends` itself: any number of buckets.

    A last bucket from i on ends at `max(before[i], ready) + latency + per_byte * (sums[j] - sums[i])`. `before` never falls:
    a plan without its last gradients ends no later. So those i whose buckets end before the gradients are ready come first,
    and the largest of them sends least; among the others `before[i] - per_byte * sums[i]` decides, a minimum over a window of
    which both ends only move on: a queue of candidates, each put in and taken out once.
    """
    ends.append(0.0)
    choices, waiting = [0], 0  # `waiting`: the largest i at which the link waits for gradients
    window: deque[tuple[float, int]] = deque()  # (before[i] - per_byte * sums[i], i), the least one in front
    for j, come in enumerate(ready, start=1):
        behind = before[j - 1] - cost.per_byte * sums[j - 1]
        while window and window[-1][0] >= behind:
            window.pop()
        window.append((behind, j - 1))
        while waiting + 1 < j and before[waiting + 1] <= come:
            waiting += 1
        # a gradient larger than allowed has a bucket of its own
        least = min(bisect_left(sums, sums[j] - cost.largest), j - 1) if cost.largest < sums[j] else 0
        first_busy = max(least, waiting + 1)
        while window and window[0][1] < first_busy:
            window.popleft()
        choice, start = (waiting, come) if waiting >= least and before[waiting] <= come else (least, math.inf)
        sent = start - cost.per_byte * sums[choice]
        if window and window[0][0] < sent:
            sent, choice = window[0]
        ends.append(sent + cost.of(sums[j]))
        choices.append(choice)
    return choices


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
