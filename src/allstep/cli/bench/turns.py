"""Whose turn it is: which side of a comparison runs the next block, which leaves early, and when there is enough.

Pure, and the same on every rank: all are given the same blocks, so that all decide alike without asking one another.
"""

import random
import statistics
from collections.abc import Sequence

from allstep.cli.bench.blocks import LEAST, Block, counted, spoilt

__all__ = ["Turns"]

LONGEST = 2.5
"""A busy machine may stretch the measuring to this many times the seconds that were asked for."""


class Turns:
    """The blocks of all sides so far, and what to do next.

        while (side := turns.next(elapsed)) is not None:
            turns.add(side, block_of(side))

    Args:
        sides: names of those that stay to the end.
        racing: names of those of which only the fastest is wanted: one whose quickest block is slower than the median of
            the best leaves, once each of them has `least` blocks.
        seconds: of measuring; more where blocks were disturbed, up to `LONGEST` times.
        least: blocks of each side, however long they take.
        most: blocks of each side, after which it is enough.
    """

    def __init__(
        self, sides: Sequence[str], *, racing: Sequence[str] = (), seconds: float, least: int = LEAST, most: int = 40
    ) -> None:
        self.blocks: dict[str, list[Block]] = {side: [] for side in (*sides, *racing)}
        """Side -> its blocks in the order in which they ran, those of sides that left included."""
        self._sides = list(sides)
        self._racing = list(racing)
        self._seconds = seconds
        self._least = least
        self._most = max(least, most)
        self._draw = random.Random(0)

    @property
    def racing(self) -> list[str]:
        """Those still in the race."""
        return list(self._racing)

    @property
    def samples(self) -> dict[str, list[float]]:
        """Side -> the seconds of its blocks that count."""
        return {side: counted(blocks, self._least) for side, blocks in self.blocks.items()}

    @property
    def spoilt(self) -> dict[str, int | bool]:
        """How many blocks there were, how many were disturbed, and whether each side that stayed has enough that were not."""
        stayed = [self.blocks[side] for side in (*self._sides, *self._racing)]
        return {**spoilt(self.blocks.values()), "enough": bool(spoilt(stayed, self._least)["enough"])}

    @property
    def best(self) -> str:
        """The one of the race with the lowest median."""
        return min(self._racing, key=lambda side: statistics.median(self.samples[side]))

    def next(self, elapsed: float) -> str | None:
        """The side to run now, `elapsed` seconds after the first block began; None where there is enough."""
        present = [*self._sides, *self._racing]
        good = {side: sum(not block.disturbed for block in self.blocks[side]) for side in present}
        fewest = min(good.values())
        if fewest >= self._most or (elapsed > self._seconds and fewest >= self._least):
            return None
        if elapsed > LONGEST * self._seconds and min(len(self.blocks[side]) for side in present) >= self._least:
            return None
        # a disturbed block counts half: its side is soon served again, but one that is always disturbed starves nobody
        served = {side: good[side] + len(self.blocks[side]) for side in present}
        return min(present, key=lambda side: (served[side], self._draw.random()))

    def add(self, side: str, block: Block) -> None:
        """Note a block, and send home who cannot win any more."""
        self.blocks[side].append(block)
        if len(self._racing) < 2 or min(len(self.blocks[one]) for one in self._racing) < self._least:
            return
        samples = self.samples
        limit = statistics.median(samples[self.best])
        self._racing = [one for one in self._racing if min(samples[one]) <= limit]
