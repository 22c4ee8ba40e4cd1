"""What the ranks' places add up to: who waits for whom, in words. Pure.

A rank is late when the others wait and it does not: because its process is gone or stopped, because it does something else,
or because it has left. Where all wait, they wait for different things, or what carries those between them is broken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from allstep.words import ranks_in_words

__all__ = ["SILENT_AFTER", "Sighting", "Story", "tell"]

SILENT_AFTER = 7.0
"""Seconds without a sign of life after which a rank counts as silent: three signs and a half."""
MOST_LATE = 4
"""Ranks that are told of one by one."""
_OF_MICRO_BATCH = ("data", "forward", "backward")
_BESIDE_TRAINING = ("evaluate", "predict", "save", "the end of training")


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One rank, as another one sees it. The fields up to `frames` are what `Place.told` says."""

    rank: int
    host: str = ""
    pid: int = 0
    phase: str = ""
    phase_age: float = 0.0
    """Seconds in that phase."""
    step: int | None = None
    micro_batch: int | None = None
    waiting: str | None = None
    """The collective that it waits for."""
    waited: float = 0.0
    """Seconds that it has waited for it."""
    detail: str = ""
    left: str = ""
    frames: Sequence[str] = field(default_factory=tuple)
    silent: float = 0.0
    """Seconds since its last sign of life."""
    process: str = ""
    """What the kernel says of the process: "gone", "stopped" or "alive"; empty where it is on another host."""
    unknown: bool = False
    """It has never been heard of."""

    @property
    def is_waiting(self) -> bool:
        """Whether it has come to a collective, and would go on if the others came too."""
        is_well = not self.left and not self.unknown and self.process not in ("gone", "stopped")
        return self.waiting is not None and is_well and self.silent < SILENT_AFTER

    @property
    def is_lost(self) -> bool:
        """Whether something happened to its process, so that waiting longer is of no use."""
        return self.process in ("gone", "stopped") or (self.silent >= SILENT_AFTER and not self.unknown)


@dataclass(frozen=True, kw_only=True)
class Story:
    """Who waits for whom."""

    late: tuple[int, ...]
    """Ranks that the others wait for; none where all wait."""
    head: str
    """One sentence."""
    lines: tuple[str, ...]
    """A few lines for each rank that matters."""

    def __str__(self) -> str:
        return "\n".join([self.head, *(f"  {line}" for line in self.lines)])


def tell(sightings: Sequence[Sighting]) -> Story:
    """The story of `sightings`, those of all ranks."""
    waiting = [each for each in sightings if each.is_waiting]
    late = [each for each in sightings if not each.is_waiting]
    if late:
        return _of_late(waiting, late)
    calls = _grouped(waiting)
    if len(calls) > 1:
        lines = [f"{ranks_in_words(each.rank for each in group)}: {_wait(group)}" for group in calls]
        lines += [line for group in calls for line in _at(group[0], f"rank {group[0].rank} is ")]
        head = "The ranks wait for different collectives, so that none of them can come to its end:"
        return Story(late=(), head=head, lines=tuple(lines))
    head = f"All {len(waiting)} ranks wait for the same collective; what carries it between them is broken or slow:"
    return Story(late=(), head=head, lines=(_wait(waiting),))


def _of_late(waiting: Sequence[Sighting], late: Sequence[Sighting]) -> Story:
    ranks, is_one = tuple(each.rank for each in late), len(late) == 1
    head = f"{ranks_in_words(ranks).capitalize()} {'is' if is_one else 'are'} late"
    if waiting:
        who = ranks_in_words(each.rank for each in waiting)
        head += f"; {who} wait{'s' if len(waiting) == 1 else ''} for {'it' if is_one else 'them'}"
    lines = []
    for each in late[:MOST_LATE]:
        process = f" (process {each.pid} on {each.host})" if each.pid else ""
        lines += [f"rank {each.rank}{process} {_why_late(each)}", *_at(each)]
    if len(late) > MOST_LATE:
        lines.append(f"... and {len(late) - MOST_LATE} more that are late")
    lines += [f"{ranks_in_words(each.rank for each in group)}: {_wait(group)}" for group in _grouped(waiting)]
    return Story(late=ranks, head=f"{head}:", lines=tuple(lines))


def _grouped(waiting: Sequence[Sighting]) -> list[list[Sighting]]:
    """Those that wait for the same thing together, in order of their first rank."""
    groups: dict[tuple[object, ...], list[Sighting]] = {}
    for each in waiting:
        beside = each.phase if each.phase in _BESIDE_TRAINING else ""
        groups.setdefault((each.waiting, each.detail, each.step, beside), []).append(each)
    return list(groups.values())


def _wait(group: Sequence[Sighting]) -> str:
    first, longest = group[0], max(each.waited for each in group)
    detail = f" ({first.detail})" if first.detail else ""
    return f"in {_stage(first)}, waiting for {longest:.0f} s in {first.waiting}{detail}"


def _stage(each: Sighting) -> str:
    """The phase, and the step, in words."""
    phase = each.phase or "the script's own code"
    if each.step is None:
        return phase
    micro = f", micro-batch {each.micro_batch}" if each.micro_batch is not None and each.phase in _OF_MICRO_BATCH else ""
    return f"{phase} ({'after ' if each.phase in _BESIDE_TRAINING else ''}step {each.step}{micro})"


def _why_late(each: Sighting) -> str:
    was = f"last heard of in {_stage(each)}"
    if each.process == "gone":
        return f"has ended{f': it {each.left}' if each.left else ''}; {was}"
    if each.process == "stopped":
        return f"is stopped by a signal (SIGSTOP, Ctrl-Z or a debugger; kill -CONT {each.pid} lets it go on); {was}"
    if each.left:
        return each.left
    if each.unknown:
        return "has not been heard of since the start"
    if each.silent >= SILENT_AFTER:
        busy = "; its process is there, so perhaps native code holds the interpreter" if each.process else ""
        return f"gives no sign of life since {each.silent:.0f} s{busy}; {was}"
    return f"is in {_stage(each)} since {each.phase_age:.0f} s"


def _at(each: Sighting, who: str = "") -> list[str]:
    return [f"    {who}at {frame}" if index == 0 else f"    at {frame}" for index, frame in enumerate(each.frames)]
