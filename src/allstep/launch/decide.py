"""What a launcher does next, decided from what it has seen. Pure: times go in as numbers, and an action comes out.

    running ──a rank failed──────────────► the others get SIGTERM ──grace period──► SIGKILL ──► finished
            ──SIGTERM, SIGUSR1, Ctrl-C, ──► the ranks get the signal ──half of it──► SIGTERM ──half──► SIGKILL
              SIGHUP                       ...those that said they will stop: only after a second signal
            ──all ranks ended────────────► processes they left behind: a second, then SIGTERM, SIGKILL

A launcher acts on the ranks of its own host. On several hosts it stays until those of all have ended.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from allstep.launch.job import JobState, RankState, Request
from allstep.launch.verdict import SETTLE, failed_by_itself, first_failure, is_consequence

__all__ = ["Action", "Finish", "Forward", "Kill", "Stop", "Wait", "decide", "over_here"]

GIVE_UP = 5.0
"""Seconds after SIGKILL in which the kernel should have ended a process; it cannot while the process waits for a disk."""
REPEAT = 0.5
"""Seconds between two Ctrl-C that are two: some wrappers pass the terminal's own on once more."""
NEVER = float("inf")


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

Times = tuple[float, float]
"""When a rank gets SIGTERM, and when SIGKILL."""


def decide(job: JobState, now: float) -> Action:
    """The next thing to do for `job` at the time `now`."""
    if over_here(job, now):
        return Finish() if _over_elsewhere(job) else Wait()
    if first_failure(job) is not None:
        return _after_failure(job, now)
    if job.requests:
        return _after_request(job, now)
    if any(state.running for state in job.here):
        return Wait()
    stop_from = max(state.ended_at or 0.0 for state in job.here) + SETTLE
    return _end_rest(job, now, lambda _: (stop_from, stop_from + job.grace_period))


def over_here(job: JobState, now: float) -> bool:
    """Whether nothing is left of the ranks of this host that could still be ended."""
    return not any(_there(state) and not _given_up(state, now) for state in job.here)


def _over_elsewhere(job: JobState) -> bool:
    """Whether machine 0 has seen the end of all others, and the others that it has."""
    awaited = job.machines[1:] if job.machine == 0 else job.machines[:1]
    return all(machine.over or machine.lost_at is not None for machine in awaited)


def _after_failure(job: JobState, now: float) -> Action:
    failed = [state for state in job.ranks if failed_by_itself(job, state)]
    seen = min(state.failed_at or now for state in failed)
    stop_from = seen + (SETTLE if all(is_consequence(state) for state in failed) else 0.0)
    impatient = any(request.time > seen for request in job.requests) and job.stopped_at is not None
    kill_from = now if impatient else stop_from + job.grace_period
    return _end_rest(job, now, lambda _: (stop_from, kill_from))


def _after_request(job: JobState, now: float) -> Action:
    if not job.forwarded:
        return Forward(signal=job.requests[0].signal)
    start, again, presses = job.requests[0].time, _second(job.requests), _presses(job.requests)
    # Once the ranks have ended, nothing is left that their children could be of use to.
    over = not any(state.running for state in job.here)
    stop_from = now if over or presses >= 2 else start + job.grace_period / 2
    kill_from = now if presses >= 3 else start + job.grace_period

    def times(state: RankState) -> Times:
        if state.stop is None or not state.running:
            return stop_from, kill_from
        return again, now if presses >= 3 else again + job.grace_period

    return _end_rest(job, now, times)


def _end_rest(job: JobState, now: float, times: Callable[[RankState], Times]) -> Action:
    """SIGTERM and SIGKILL at the times of each rank of this host, each once, to all of them that are still there."""
    stop, kill, later = [], [], []
    for state in job.here:
        if not _there(state) or _given_up(state, now):
            continue
        stop_from, kill_from = times(state)
        if state.killed_at is not None:
            later.append(state.killed_at + GIVE_UP)
        elif now >= kill_from:
            kill.append(state.rank)
        # One that is failing gets its time to end by itself.
        elif signal.SIGTERM in state.sent or (state.running and state.record is not None):
            later.append(kill_from)
        elif now >= stop_from:
            stop.append(state.rank)
        else:
            later.append(min(stop_from, kill_from))
    if kill:
        return Kill(ranks=tuple(kill))
    if stop:
        return Stop(ranks=tuple(stop))
    until = min(later, default=NEVER)
    return Wait(until=until if until < NEVER else None)


def _there(state: RankState) -> bool:
    return state.running or state.leftovers


def _given_up(state: RankState, now: float) -> bool:
    return state.killed_at is not None and now >= state.killed_at + GIVE_UP


def _presses(requests: tuple[Request, ...]) -> int:
    """How often Ctrl-C was pressed at one host; any other signal counts once, however often it came."""
    counts = dict.fromkeys((request.machine for request in requests), 0)
    last: dict[int, float] = {}
    for request in requests:
        start = last.get(request.machine)
        if start is None or (request.signal == signal.SIGINT and request.time >= start + REPEAT):
            counts[request.machine] += 1
            last[request.machine] = request.time
    return max(counts.values())


def _second(requests: tuple[Request, ...]) -> float:
    """When somebody asked again, by SIGTERM or Ctrl-C, who will not wait for ranks that stop in order.

    The same host is meant: a scheduler signals the launchers of all, and they hear it one after the other.
    """
    starts: dict[int, float] = {}
    for request in requests:
        start = starts.setdefault(request.machine, request.time)
        if request.signal in (signal.SIGTERM, signal.SIGINT) and request.time >= start + REPEAT:
            return request.time
    return NEVER
