"""What a launcher does next, decided from what it has seen. Pure: times go in as numbers, and an action comes out.

    running ──a rank failed──────────► the others get SIGTERM ──grace period──► SIGKILL ──► finished
            ──Ctrl-C, SIGTERM, SIGHUP─► the ranks get the signal ──half of it──► SIGTERM ──half──► SIGKILL
            ──all ranks ended─────────► processes they left behind: a second, then SIGTERM, SIGKILL

All times are unix seconds.
"""

import enum
import signal
from dataclasses import dataclass

from allstep.launch.record import FailureRecord

__all__ = [
    "Action",
    "Finish",
    "Forward",
    "JobState",
    "Kill",
    "Outcome",
    "RankState",
    "Request",
    "Stop",
    "Wait",
    "decide",
    "first_failure",
    "interrupted_by",
    "outcome",
]

SETTLE = 1.0
"""Seconds to wait for the cause where all that is seen so far are consequences, and for leftovers to end by themselves."""
GIVE_UP = 5.0
"""Seconds after SIGKILL in which the kernel should have ended a process; it cannot while the process waits for a disk."""
REPEAT = 0.5
"""Seconds between two Ctrl-C that are two: some wrappers pass the terminal's own on once more."""

_BROKEN_CONNECTION = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "distbackenderror",
    "distnetworkerror",
    "diststoreerror",
    "recvvalue failed",
    "failed to recv, got 0 bytes",
    "timed out waiting",
    "timed out connecting",
    "client socket has timed out",
    "waiting for clients",
    "wait timeout after",
    "collective operation timeout",
    "remote process exited",
)
"""What gloo, NCCL and torch's store say, in lower case, when the process at the other end has gone or does not come."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank, as its launcher sees it."""

    rank: int
    pid: int
    exit_code: int | None = None
    """None while it runs; as subprocess gives it: minus the signal where one ended it."""
    ended_at: float | None = None
    """When its end was seen."""
    record: FailureRecord | None = None
    """What it left behind. A rank that still runs may have one: it failed and is on its way out."""
    failed_at: float | None = None
    """When its failure was first seen, by its exit code or its record."""
    sent: tuple[int, ...] = ()
    """Signals sent to all processes of its group."""
    received: tuple[int, ...] = ()
    """Those of them that were sent while the rank itself still ran, and so may be what ended it."""
    leftovers: bool = False
    """It has ended, and processes that it started have not."""

    @property
    def running(self) -> bool:
        return self.exit_code is None

    @property
    def failed(self) -> bool:
        return self.record is not None or self.exit_code not in (None, 0)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A signal that the launcher itself got: somebody wants the job to stop."""

    signal: int
    time: float


@dataclass(frozen=True, kw_only=True)
class JobState:
    """All that a decision rests on."""

    ranks: tuple[RankState, ...]
    requests: tuple[Request, ...] = ()
    forwarded: bool = False
    """The first request has been passed on to the ranks."""
    stopped_at: float | None = None
    """When the launcher first sent SIGTERM to ranks."""
    killed_at: float | None = None
    """When it first sent SIGKILL."""
    grace_period: float = 5.0
    """Seconds between the first and the last means."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Do nothing until something happens, or until `until`, where it is not None."""

    until: float | None = None


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Pass `signal` on to the ranks themselves, not to processes that they started."""

    signal: int


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Send SIGTERM to `ranks` and all processes of their groups."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Send SIGKILL to `ranks` and all processes of their groups."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Nothing is left to wait for."""


Action = Wait | Forward | Stop | Kill | Finish


class Outcome(str, enum.Enum):
    """How a rank ended."""

    FINISHED = "finished"
    """By itself, with exit code 0."""
    FAILED_FIRST = "failed first"
    """It is the cause of the end of the job."""
    FAILED_TOO = "failed too"
    """By itself as well, but later."""
    CONSEQUENCE = "failed as a consequence"
    """Because another rank had gone, or while it was being stopped."""
    STOPPED = "stopped"
    """By the launcher."""


def decide(job: JobState, now: float) -> Action:
    """The next thing to do for `job` at the time `now`."""
    alive = [state for state in job.ranks if state.running or state.leftovers]
    if not alive:
        return Finish()
    if job.killed_at is not None and now >= job.killed_at + GIVE_UP:
        return Finish()
    first = first_failure(job)
    if first is not None:
        return _after_failure(job, first, now)
    if job.requests:
        return _after_request(job, now)
    if any(state.running for state in job.ranks):
        return Wait()
    stop_from = max(state.ended_at or 0.0 for state in job.ranks) + SETTLE
    return _end_rest(job, now, stop_from, stop_from + job.grace_period)


def _after_failure(job: JobState, first: RankState, now: float) -> Action:
    seen = min(state.failed_at or now for state in job.ranks if _failed_by_itself(job, state))
    stop_from = seen + (SETTLE if _is_consequence(first) else 0.0)
    impatient = any(request.time > seen for request in job.requests) and job.stopped_at is not None
    return _end_rest(job, now, stop_from, now if impatient else stop_from + job.grace_period)


def _after_request(job: JobState, now: float) -> Action:
    if not job.forwarded:
        return Forward(signal=job.requests[0].signal)
    start, presses = job.requests[0].time, _presses(job.requests)
    # Once the ranks have ended, nothing is left that their children could be of use to.
    over = not any(state.running for state in job.ranks)
    stop_from = now if over or presses >= 2 else start + job.grace_period / 2
    return _end_rest(job, now, stop_from, now if presses >= 3 else start + job.grace_period)


def _end_rest(job: JobState, now: float, stop_from: float, kill_from: float) -> Action:
    """SIGTERM from `stop_from` on, SIGKILL from `kill_from` on, each once to all that are still there."""
    if now >= kill_from:
        targets = _not_yet(job, signal.SIGKILL)
        return Kill(ranks=targets) if targets else Wait(until=(job.killed_at or now) + GIVE_UP)
    if now >= stop_from:
        targets = _not_yet(job, signal.SIGTERM)
        return Stop(ranks=targets) if targets else Wait(until=kill_from)
    return Wait(until=min(stop_from, kill_from))


def _not_yet(job: JobState, number: int) -> tuple[int, ...]:
    """Ranks that have processes and have not been sent the signal. One that is failing gets its time to end by itself."""
    return tuple(
        state.rank
        for state in job.ranks
        if (state.leftovers or (state.running and (state.record is None or number == signal.SIGKILL)))
        and number not in state.sent
    )


def _presses(requests: tuple[Request, ...]) -> int:
    """How often Ctrl-C was pressed; any other signal counts once, however often it came."""
    count, last = 1, requests[0].time
    for request in requests[1:]:
        if request.signal == signal.SIGINT and request.time >= last + REPEAT:
            count, last = count + 1, request.time
    return count


def first_failure(job: JobState) -> RankState | None:
    """The rank that failed first, or None where none did, or only after somebody asked the job to stop.

    A broken connection is what the other ranks see when one dies. So a rank that reports one is first only where no rank
    failed otherwise. Among equals the earliest counts, by its record, which the rank itself stamped, else by its end.
    """
    failed = [state for state in job.ranks if _failed_by_itself(job, state)]
    return min(failed, key=lambda state: (_is_consequence(state), _failure_time(state)), default=None)


def interrupted_by(job: JobState) -> int | None:
    """The signal that ended the job, where a rank still ran when it came and none had failed."""
    if not job.requests or first_failure(job) is not None:
        return None
    request = job.requests[0]
    return request.signal if any(state.running or (state.ended_at or 0) >= request.time for state in job.ranks) else None


def outcome(job: JobState, state: RankState) -> Outcome:
    """How the rank `state` of the ended `job` ended."""
    if not state.failed and not state.running:
        return Outcome.FINISHED
    if _failed_by_itself(job, state):
        if state is first_failure(job):
            return Outcome.FAILED_FIRST
        return Outcome.CONSEQUENCE if _is_consequence(state) else Outcome.FAILED_TOO
    return Outcome.CONSEQUENCE if state.record is not None else Outcome.STOPPED


def _failed_by_itself(job: JobState, state: RankState) -> bool:
    """Whether the failure is the rank's own, not what the launcher's signals did to it."""
    if not state.failed or (job.requests and _failure_time(state) >= job.requests[0].time):
        return False
    if not state.received:
        return True
    if state.record is not None:
        return job.stopped_at is None or state.record.time <= job.stopped_at
    if state.exit_code is None or state.exit_code > 0:
        return False  # a handler for SIGTERM chose this code
    return -state.exit_code not in state.received


def _failure_time(state: RankState) -> float:
    if state.record is not None:
        return state.record.time
    return state.failed_at if state.failed_at is not None else float("inf")


def _is_consequence(state: RankState) -> bool:
    """Whether the failure looks like one whose cause lies on another rank."""
    if state.record is None:
        return False
    text = f"{state.record.error}: {state.record.message}".lower()
    return state.record.collateral or any(sign in text for sign in _BROKEN_CONNECTION)
