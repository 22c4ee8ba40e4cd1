"""Who holds up the others while nothing hangs: a rank that never waits, where the others wait for it in every step. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from allstep.words import ranks_in_words

__all__ = ["Pace", "held_up"]

STEPS = 10
"""Steps over which ranks are compared, at least."""
SECONDS = 4.0
"""And time."""
IDLE = 0.3
"""Share of its time that each of the others waits, where one rank counts as holding them up."""
BUSY = 0.1
"""Share that such a rank waits itself, at most."""


@dataclass(frozen=True)
class Pace:
    """What a rank has done since its start."""

    step: int
    """Optimizer steps."""
    waited: float
    """Seconds that it waited for others."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds in each phase, waiting included."""


def held_up(before: Sequence[Pace], after: Sequence[Pace]) -> tuple[tuple[int, ...], str] | None:
    """The ranks that held up the others between two looks at all ranks, and a sentence; None where the time is too short.

    No ranks and no words where none did.
    """
    steps = min(late.step - early.step for early, late in zip(before, after, strict=True))
    seconds = [sum(late.spent.values()) - sum(early.spent.values()) for early, late in zip(before, after, strict=True)]
    if steps < STEPS or min(seconds) < SECONDS:
        return None
    shares = [(late.waited - early.waited) / time for early, late, time in zip(before, after, seconds, strict=True)]
    slow = [rank for rank, share in enumerate(shares) if share < BUSY]
    others = [rank for rank, share in enumerate(shares) if share > IDLE]
    if not slow or not others or len(slow) + len(others) < len(shares):
        return (), ""
    phase, own, theirs = max(
        (_per_step(before, after, slow, others, phase) for phase in after[slow[0]].spent),
        key=lambda each: each[1] - each[2],
    )
    waits = sum(after[rank].waited - before[rank].waited for rank in others) / len(others) / steps
    step = sum(seconds) / len(seconds) / steps
    hold = "holds" if len(slow) == 1 else "hold"
    return tuple(slow), (
        f"{ranks_in_words(slow).capitalize()} {hold} up the others, who wait {_time(waits)} of each {_time(step)} step: "
        f"{phase or 'code between steps'} takes {_time(own)} a step there, {_time(theirs)} elsewhere."
    )


def _per_step(
    before: Sequence[Pace], after: Sequence[Pace], slow: Sequence[int], others: Sequence[int], phase: str
) -> tuple[str, float, float]:
    """A phase, and the seconds of a step that the slow ranks and the others work in it."""

    def mean(ranks: Sequence[int]) -> float:
        return sum(_worked(before[rank], after[rank], phase) for rank in ranks) / len(ranks)

    return phase, mean(slow), mean(others)


def _worked(before: Pace, after: Pace, phase: str) -> float:
    spent = after.spent.get(phase, 0.0) - before.spent.get(phase, 0.0)
    if phase == "backward":  # where ranks wait
        spent -= after.waited - before.waited
    return max(0.0, spent) / (after.step - before.step)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
