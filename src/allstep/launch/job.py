"""What a launcher has seen of its job: ranks, hosts and the signals that it got. All times are unix seconds."""

import json
import signal
from dataclasses import dataclass, replace

from allstep.launch.record import FailureRecord

__all__ = ["JobState", "Machine", "RankState", "Request", "StopNote", "shifted"]

STOPPED = 128 + signal.SIGTERM
"""Exit code of a rank that stopped in order because it was asked to."""


@dataclass(frozen=True, kw_only=True)
class StopNote:
    """What a rank says that was asked to stop and will do so in order; the rest follows once it has stopped."""

    signal: int
    rank: int | None = None
    """The rank that got the signal."""
    step: int | None = None
    """Optimizer steps done when it stopped."""
    checkpoint: str | None = None
    """What it saved, where it saved."""

    @classmethod
    def from_json(cls, text: str) -> "StopNote":
        """The note that a rank wrote. What else it holds is not looked at.

        Raises:
            ValueError: this is none.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict) or not isinstance(fields.get("signal"), int):
            raise ValueError(f"expected an object with the number of a signal, found {text[:80]!r}")
        return cls(
            signal=fields["signal"], rank=fields.get("rank"), step=fields.get("step"), checkpoint=fields.get("checkpoint")
        )


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank, as its launcher sees it."""

    rank: int
    pid: int
    machine: int = 0
    """Number of its host."""
    exit_code: int | None = None
    """None while it runs; as subprocess gives it: minus the signal where one ended it."""
    ended_at: float | None = None
    """When its end was seen."""
    record: FailureRecord | None = None
    """What it left behind. A rank that still runs may have one: it failed and is on its way out."""
    failed_at: float | None = None
    """When its failure was first seen, by its exit code or its record."""
    stop: StopNote | None = None
    """It was asked to stop, and said that it will."""
    lost_at: float | None = None
    """When its host was last heard of, where it still ran then; nobody knows what has become of it."""
    sent: tuple[int, ...] = ()
    """Signals sent to all processes of its group."""
    received: tuple[int, ...] = ()
    """Those of them that were sent while the rank itself still ran, and so may be what ended it."""
    killed_at: float | None = None
    """When SIGKILL was sent."""
    oom_kills: int | None = None
    """Where SIGKILL ended it: processes of its control group that the kernel had killed by then, since the start, because
    memory ran out; None where the kernel does not tell."""
    leftovers: bool = False
    """It has ended, and processes that it started have not."""

    @property
    def running(self) -> bool:
        return self.exit_code is None and self.lost_at is None

    @property
    def stopped_in_order(self) -> bool:
        """Whether it ended because it was asked to, and did all that it had to do before."""
        return self.stop is not None and self.record is None and self.exit_code == STOPPED

    @property
    def failed(self) -> bool:
        if self.record is not None or self.lost_at is not None:
            return True
        return self.exit_code not in (None, 0) and not self.stopped_in_order


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host of a job on several, as the other launchers see it."""

    machine: int
    host: str
    """Its name."""
    over: bool = False
    """Its ranks have ended, or cannot be ended."""
    lost_at: float | None = None
    """When it was last heard of, where it went away before the job ended."""
    lost_because: str = ""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A signal that a launcher itself got: somebody wants the job to stop."""

    signal: int
    time: float
    machine: int = 0
    """The host whose launcher got it."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """All that a decision rests on."""

    ranks: tuple[RankState, ...]
    """Those of all hosts."""
    machine: int = 0
    """The host of the launcher that decides. It acts on its own ranks only."""
    machines: tuple[Machine, ...] = ()
    """All hosts of the job, where there are several."""
    requests: tuple[Request, ...] = ()
    forwarded: bool = False
    """The first request has been passed on to the ranks of this host."""
    stopped_at: float | None = None
    """When a launcher first sent SIGTERM or SIGKILL to ranks."""
    grace_period: float = 10.0
    """Seconds between the first and the last means."""

    @property
    def here(self) -> tuple[RankState, ...]:
        """The ranks of this host."""
        return tuple(state for state in self.ranks if state.machine == self.machine)


def shifted(state: RankState, seconds: float) -> RankState:
    """The same rank by a clock that is `seconds` ahead."""

    def moved(time: float | None) -> float | None:
        return None if time is None else time + seconds

    return replace(
        state,
        ended_at=moved(state.ended_at),
        failed_at=moved(state.failed_at),
        lost_at=moved(state.lost_at),
        killed_at=moved(state.killed_at),
        record=replace(state.record, time=state.record.time + seconds) if state.record else None,
    )
