"""Blocks of a measurement: which of them count, their median, and how far to trust it. Nothing in here looks at a clock.

A block is a short row of calls or steps of one side, timed as one. Sides take turns, block by block, so that whatever slows
the machine down for a while falls on all of them.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "DISTURBED",
    "LEAST",
    "Block",
    "Estimate",
    "counted",
    "estimate",
    "foreign_share",
    "geometric_mean",
    "medians",
    "short",
    "spoilt",
]

DISTURBED = 0.05
"""Share of the cores' time above which what other processes took makes a block worthless."""
LEAST = 3
"""Blocks of each side, where nobody asks for more or fewer."""
DRAWS = 1000
"""Resamples of one bootstrap interval."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of one side."""

    seconds: float
    """Of one call or step, the mean over the block, on the slowest rank."""
    foreign: float
    """Share of the cores' time, 0 to 1, that other processes took meanwhile."""

    @property
    def disturbed(self) -> bool:
        """Whether others took too much for the block to count."""
        return self.foreign > DISTURBED


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number from medians, and the interval in which it lies in 95 of 100 cases."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{short(self.value)} ({short(self.low)} to {short(self.high)})"

    def inverse(self) -> "Estimate":
        """1 / this: the same ratio, read the other way round."""
        return Estimate(value=1 / self.value, low=1 / self.high, high=1 / self.low)


def short(number: float) -> str:
    """Three digits, and no more: 0.123, 1.23, 12.3, 123."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    return f"{number:.{max(0, 2 - max(-1, math.floor(math.log10(abs(number)))))}f}"


def counted(blocks: Sequence[Block], least: int = LEAST) -> list[float]:
    """The seconds of the blocks that count: those undisturbed, or the `least` that were least disturbed, where too few are."""
    good = [block.seconds for block in blocks if not block.disturbed]
    if len(good) >= least:
        return good
    return [block.seconds for block in sorted(blocks, key=lambda block: block.foreign)[:least]]


def spoilt(sides: Iterable[Sequence[Block]], least: int = LEAST) -> dict[str, int | bool]:
    """How many blocks there were and how many of them were disturbed; `enough`: each side had `least` that were not."""
    each = [[block.disturbed for block in blocks] for blocks in sides]
    return {
        "measured": sum(len(one) for one in each),
        "disturbed": sum(sum(one) for one in each),
        "enough": all(len(one) - sum(one) >= least for one in each),
    }


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Side -> median of its seconds."""
    return {side: statistics.median(values) for side, values in samples.items()}


def estimate(
    samples: Mapping[str, Sequence[float]], of: Callable[[Mapping[str, float]], float | None], *, seed: int = 0
) -> Estimate | None:
    """`of(medians)` with its 95 % interval: the percentile bootstrap (Efron and Tibshirani, 1993, chapter 13) over blocks.

    Args:
        samples: side -> seconds of its blocks that count.
        of: the number that is wanted, from the medians of the sides; None where it means nothing.

    Returns:
        None where `of` gives None for the medians themselves.
    """
    value = of(medians(samples))
    if value is None:
        return None
    draw = random.Random(seed)
    drawn = []
    for _ in range(DRAWS):
        again = of({side: statistics.median(draw.choices(values, k=len(values))) for side, values in samples.items()})
        if again is not None:
            drawn.append(again)
    drawn.sort()
    # an interval that leaves the value out would only say that there are very few blocks
    return Estimate(
        value=value, low=min(value, drawn[int(0.025 * len(drawn))]), high=max(value, drawn[int(0.975 * len(drawn))])
    )


def geometric_mean(estimates: Sequence[Estimate]) -> Estimate:
    """The geometric mean of independent ratios; its interval by propagation of their errors in logarithms."""
    count = len(estimates)
    logs = [math.log(one.value) for one in estimates]
    below = math.sqrt(sum((log - math.log(one.low)) ** 2 for log, one in zip(logs, estimates, strict=True))) / count
    above = math.sqrt(sum((math.log(one.high) - log) ** 2 for log, one in zip(logs, estimates, strict=True))) / count
    middle = sum(logs) / count
    return Estimate(value=math.exp(middle), low=math.exp(middle - below), high=math.exp(middle + above))


def foreign_share(*, busy: float, own: float, wall: float, cores: int, tick: float) -> float:
    """Share of the cores' time that went to others.

    Args:
        busy: seconds for which cores were busy with anything, all cores together.
        own: CPU seconds of the ranks.
        wall: seconds that the block took.
        tick: the kernel's clock tick in seconds; two of them are rounding.
    """
    return min(1.0, max(0.0, busy - own - 2 * tick) / (wall * cores)) if wall > 0 else 0.0
