"""Which rank is to blame: read from what was seen of all of them. Pure."""

import enum
import signal

from allstep.launch.job import JobState, RankState, StopNote

__all__ = ["Outcome", "failed_by_itself", "first_failure", "interrupted_by", "is_consequence", "outcome", "stop_note"]

SETTLE = 1.0
"""Seconds to wait for the cause where all that is seen so far are consequences, and for leftovers to end by themselves."""

_ASKED_TO_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

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
    "no route to host",
)
"""What gloo, NCCL and torch's store say, in lower case, when the process at the other end has gone or does not come."""


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
    """By the launcher, or in order, because it was asked to."""
    LOST = "was lost with its host"
    """Its host went away."""


def first_failure(job: JobState) -> RankState | None:
    """The rank that failed first, or None where none did, or only after somebody asked the job to stop.

    A broken connection is what the other ranks see when one dies. So a rank that reports one is first only where no rank
    failed otherwise. Where none did, and one had left without an error by then, that one broke the connection. Among equals
    the earliest counts, by its record, which the rank itself stamped, else by its end.
    """
    failed = [state for state in job.ranks if failed_by_itself(job, state)]
    first = min(failed, key=lambda state: (is_consequence(state), _failure_time(state)), default=None)
    if first is None or not is_consequence(first):
        return first
    # The kernel closes the connections of a rank that leaves before its launcher sees the end of the process.
    left = [state for state in job.ranks if _left_by_itself(state) and _end(state) <= _failure_time(first) + SETTLE]
    return min(left, key=_end, default=first)


def interrupted_by(job: JobState) -> int | None:
    """The signal that ended the job, where a rank still ran when it came and none had failed."""
    if first_failure(job) is not None:
        return None
    if job.requests:
        request = job.requests[0]
        return request.signal if any(state.running or _end(state) >= request.time for state in job.ranks) else None
    note = stop_note(job)
    return note.signal if note is not None else None


def stop_note(job: JobState) -> StopNote | None:
    """What the ranks of the job said of a stop in order: where all of them left so, the words of the one that said most."""
    notes = [state.stop for state in job.ranks if state.stopped_in_order and state.stop is not None]
    return max(notes, key=lambda note: (note.step is not None, note.checkpoint is not None), default=None)


def outcome(job: JobState, state: RankState) -> Outcome:
    """How the rank `state` of the ended `job` ended."""
    if state is first_failure(job):
        return Outcome.FAILED_FIRST
    if state.lost_at is not None:
        return Outcome.LOST
    if state.stopped_in_order:
        return Outcome.STOPPED
    if not state.failed and not state.running:
        return Outcome.FINISHED
    if failed_by_itself(job, state):
        return Outcome.CONSEQUENCE if is_consequence(state) else Outcome.FAILED_TOO
    return Outcome.CONSEQUENCE if state.record is not None else Outcome.STOPPED


def failed_by_itself(job: JobState, state: RankState) -> bool:
    """Whether the failure is the rank's own, not what the launcher's signals did to it."""
    if not state.failed:
        return False
    if job.requests and _failure_time(state) >= job.requests[0].time:
        return _stop_went_wrong(state)
    if not state.received:
        return True
    if state.record is not None:
        return job.stopped_at is None or state.record.time <= job.stopped_at
    if state.exit_code is None or state.exit_code > 0:
        return False  # a handler for SIGTERM chose this code
    return -state.exit_code not in state.received


def is_consequence(state: RankState) -> bool:
    """Whether the failure looks like one whose cause lies on another rank."""
    if state.record is None:
        return False
    text = f"{state.record.error}: {state.record.message}".lower()
    return state.record.collateral or any(sign in text for sign in _BROKEN_CONNECTION)


def _stop_went_wrong(state: RankState) -> bool:
    """Whether a rank that had said that it would stop in order did not, though nobody pressed it: its disk was full, say."""
    if state.stop is None or state.received or is_consequence(state):
        return False
    return state.record is not None or (state.exit_code is not None and -state.exit_code not in (0, *_ASKED_TO_STOP))


def _left_by_itself(state: RankState) -> bool:
    """Whether the rank ended without an error, and not because its launcher stopped it."""
    return state.exit_code is not None and not state.failed and not state.received


def _end(state: RankState) -> float:
    return state.ended_at or 0.0


def _failure_time(state: RankState) -> float:
    if state.record is not None:
        return state.record.time
    times = [time for time in (state.lost_at, state.failed_at) if time is not None]
    return min(times, default=float("inf"))
