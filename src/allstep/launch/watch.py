"""Stays with the ranks of a launch until the last of their processes has ended.

One loop: see what happened, ask `decide` what to do, do it, sleep until a signal comes. A child's end is such a signal.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from allstep.launch.decide import Finish, Forward, JobState, Kill, RankState, Request, Stop, Wait, decide
from allstep.launch.failures import LaunchResult
from allstep.launch.logs import RankFiles
from allstep.launch.record import FailureRecord
from allstep.launch.signals import Signals, signal_group

__all__ = ["watch"]

LONGEST_SLEEP = 1.0
"""Seconds after which a sleeping launcher looks for failure records: a rank may fail and then hang on its way out."""


def watch(
    processes: Sequence[subprocess.Popen[bytes]],
    *,
    grace_period: float,
    files: RankFiles,
    signals: Signals,
    say: Callable[[str], None],
    started_at: float,
) -> LaunchResult:
    """Watch over `processes`, by rank, and return when none of theirs is left. Each leads a process group.

    Args:
        grace_period: seconds between the first and the last means to end a rank.
        files: what the ranks write.
        signals: those to this process, noted since before the ranks started.
        say: gets the few lines that tell what goes on.
        started_at: when the launch began, unix seconds.
    """
    return _Watch(processes, grace_period, files, signals, say).run(started_at)


class _Watch:
    """One launch in progress."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        grace_period: float,
        files: RankFiles,
        signals: Signals,
        say: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._files = files
        self._signals = signals
        self._say = say
        self._clock = time.time() - time.monotonic()  # waiting must not depend on who sets the clock meanwhile
        ranks = tuple(RankState(rank=rank, pid=one.pid) for rank, one in enumerate(processes))
        self._job = JobState(ranks=ranks, grace_period=grace_period)

    def run(self, started_at: float) -> LaunchResult:
        """Watch to the end."""
        while not isinstance(action := decide(self._observed(), self._now()), Finish):
            match action:
                case Wait(until=until):
                    self._signals.wait(LONGEST_SLEEP if until is None else min(LONGEST_SLEEP, until - self._now()))
                case Forward(signal=number):
                    self._forward(number)
                case Stop(ranks=ranks):
                    self._send(ranks, signal.SIGTERM)
                case Kill(ranks=ranks):
                    self._send(ranks, signal.SIGKILL)
        result = LaunchResult.of(self._job, host=os.uname().nodename, started_at=started_at, ended_at=self._now())
        tail = self._files.tail(result.first_failure.rank) if result.first_failure else ()
        return replace(result, tail=tail, logs=self._files.finish(keep=result.exit_code != 0))

    def _now(self) -> float:
        """Unix seconds that never jump."""
        return self._clock + time.monotonic()

    def _observed(self) -> JobState:
        """Bring the state of the job up to date, and return it."""
        now = self._now()
        requests = tuple(Request(signal=number, time=now) for number in self._signals.taken())
        if requests and not self._job.requests:
            self._say(_interruption(requests[0].signal, len(self._processes)))
        ranks = tuple(self._observed_rank(state, now) for state in self._job.ranks)
        self._job = replace(self._job, ranks=ranks, requests=(*self._job.requests, *requests))
        return self._job

    def _observed_rank(self, state: RankState, now: float) -> RankState:
        if state.running and (code := self._processes[state.rank].poll()) is not None:
            state = replace(state, exit_code=code, ended_at=now, leftovers=True)
        if state.leftovers:
            state = replace(state, leftovers=_group_lives(state.pid))
        if state.record is None and (state.running or state.ended_at == now):
            state = replace(state, record=_record_at(self._files.failure(state.rank)))
        if state.failed and state.failed_at is None:
            state = replace(state, failed_at=now)
        return state

    def _forward(self, number: int) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(number)
        self._job = replace(self._job, forwarded=True)

    def _send(self, targets: tuple[int, ...], number: signal.Signals) -> None:
        """Send a signal to all processes of some ranks, and note that."""
        for rank in targets:
            signal_group(self._job.ranks[rank].pid, number)
        ranks = tuple(_sent(state, number) if state.rank in targets else state for state in self._job.ranks)
        now = self._now()
        self._job = replace(
            self._job,
            ranks=ranks,
            stopped_at=self._job.stopped_at or now,
            killed_at=self._job.killed_at or (now if number == signal.SIGKILL else None),
        )


def _sent(state: RankState, number: int) -> RankState:
    received = (*state.received, number) if state.running else state.received
    return replace(state, sent=(*state.sent, number), received=received)


def _group_lives(leader: int) -> bool:
    """Whether processes are left in the group of a rank that has itself been reaped; those that ended are reaped here."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-leader, os.WNOHANG)[0] != 0:
            pass
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _record_at(path: str) -> FailureRecord | None:
    try:
        with open(path) as file:
            return FailureRecord.from_json(file.read())
    except OSError:
        return None


def _interruption(number: int, count: int) -> str:
    who = "1 rank" if count == 1 else f"{count} ranks"
    if number == signal.SIGINT:
        return f"\nallstep: Ctrl-C: stopping {who} (press it again to be quicker)"
    return f"allstep: {signal.Signals(number).name}: stopping {who}"
