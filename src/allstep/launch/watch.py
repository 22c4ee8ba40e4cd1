"""Stays with the ranks of one generation until the last of their processes has ended, on all hosts.

One loop: see what happened, hear what the other hosts saw, ask `decide` what to do, do it, sleep until something comes. A
child's end is a signal, and so wakes it.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from allstep.launch.decide import Finish, Forward, Kill, Stop, Wait, decide, over_here
from allstep.launch.frozen import FrozenRanks
from allstep.launch.generation import Generation
from allstep.launch.job import JobState, Machine, RankState, Request, StopNote
from allstep.launch.logs import RankFiles
from allstep.launch.memory import oom_kills
from allstep.launch.party import Party
from allstep.launch.record import FailureRecord
from allstep.launch.result import LaunchResult
from allstep.launch.signals import Signals, signal_group
from allstep.launch.spec import LaunchSpec
from allstep.launch.verdict import first_failure

__all__ = ["watch"]

SHOWN_EVERY = 0.2
"""Seconds after which output of the ranks is shown at the latest, where it is shown at all."""
HEARD_EVERY = 1.0
"""Seconds after which other hosts are spoken to at the latest."""


def watch(
    processes: Sequence[subprocess.Popen[bytes]],
    *,
    spec: LaunchSpec,
    generation: Generation,
    party: Party,
    files: RankFiles,
    signals: Signals,
    say: Callable[[str], None],
    started_at: float,
    oom_kills_before: int | None,
) -> LaunchResult:
    """Watch over `processes`, the ranks of this host in their order, and return when none is left here or elsewhere.

    Args:
        spec: what was launched.
        generation: who is where.
        party: the launchers of the other hosts.
        files: what the ranks write.
        signals: those to this process, noted since before the ranks started.
        say: gets the few lines that tell what goes on.
        started_at: when the launch began, unix seconds.
        oom_kills_before: what `oom_kills` gave before the ranks started.
    """
    return _Watch(processes, spec, generation, party, files, signals, say, oom_kills_before).run(started_at)


class _Watch:
    """One generation in progress."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        spec: LaunchSpec,
        generation: Generation,
        party: Party,
        files: RankFiles,
        signals: Signals,
        say: Callable[[str], None],
        oom_kills_before: int | None,
    ) -> None:
        self._processes = dict(zip(generation.here, processes, strict=True))
        self._spec = spec
        self._party = party
        self._files = files
        self._signals = signals
        self._say = say
        self._oom_kills_before = oom_kills_before
        self._frozen = FrozenRanks()
        self._clock = time.time() - time.monotonic()  # waiting must not depend on who sets the clock meanwhile
        several = len(generation.counts) > 1
        self._longest = min(
            spec.monitor_interval, SHOWN_EVERY if spec.tee else float("inf"), HEARD_EVERY if several else float("inf")
        )
        self._job = JobState(
            ranks=tuple(
                RankState(rank=rank, pid=self._processes[rank].pid if rank in self._processes else 0, machine=machine)
                for machine in range(len(generation.counts))
                for rank in generation.ranks(machine)
            ),
            machine=generation.machine,
            machines=tuple(Machine(machine=each, host=host) for each, host in enumerate(generation.hosts)) if several else (),
            grace_period=spec.grace_period,
        )

    def run(self, started_at: float) -> LaunchResult:
        """Watch to the end."""
        while not isinstance(action := decide(self._observed(), self._now()), Finish):
            match action:
                case Wait(until=until):
                    seconds = self._longest if until is None else min(self._longest, until - self._now())
                    self._signals.wait(seconds, self._party.sockets())
                case Forward(signal=number):
                    self._pass_on(number)
                    self._job = replace(self._job, forwarded=True)
                case Stop(ranks=ranks):
                    self._send(ranks, signal.SIGTERM)
                case Kill(ranks=ranks):
                    self._send(ranks, signal.SIGKILL)
        self._show(last=True)
        return LaunchResult.of(
            self._job, host=os.uname().nodename, started_at=started_at, ended_at=self._now(), tail=self._tail()
        )

    def _now(self) -> float:
        """Unix seconds that never jump."""
        return self._clock + time.monotonic()

    def _observed(self) -> JobState:
        """Bring the state of the job up to date, and return it."""
        now = self._now()
        asked_before = bool(self._job.requests)
        for number in self._signals.taken():
            if number == signal.SIGUSR2:
                self._pass_on(number)
            else:
                request = Request(signal=number, time=now, machine=self._job.machine)
                self._job = replace(self._job, requests=(*self._job.requests, request))
        self._show()
        ranks = tuple(self._observed_rank(state, now) for state in self._job.ranks)
        self._job = replace(self._job, ranks=ranks)
        for sentence in self._frozen.look({state.rank: state.pid for state in ranks if state.running and state.pid}, now):
            self._say(f"allstep: {sentence}")
        over = over_here(self._job, now)
        self._job = self._party.exchange(self._job, now, self._tail() if over else None)
        if self._job.requests and not asked_before:
            self._say(_interruption(self._job.requests[0], self._job))
        return self._job

    def _observed_rank(self, state: RankState, now: float) -> RankState:
        if state.rank not in self._processes:
            return state
        if state.running and (code := self._processes[state.rank].poll()) is not None:
            state = replace(state, exit_code=code, ended_at=now, leftovers=True)
            if code == -signal.SIGKILL:
                state = replace(state, oom_kills=self._oom_kills())
        if state.leftovers:
            state = replace(state, leftovers=_group_lives(state.pid))
        if state.running or state.ended_at == now:
            stop = _stop_note_at(self._files.stop(state.rank)) or state.stop
            state = replace(state, record=state.record or _record_at(self._files.failure(state.rank)), stop=stop)
        if state.failed and state.failed_at is None:
            state = replace(state, failed_at=now)
        return state

    def _oom_kills(self) -> int | None:
        now = oom_kills()
        return None if now is None or self._oom_kills_before is None else now - self._oom_kills_before

    def _tail(self) -> tuple[str, ...]:
        """The last lines of the rank that failed first, where it was on this host and nobody saw them."""
        first = first_failure(self._job)
        return self._files.tail(first.rank) if first is not None and not self._spec.tee else ()

    def _show(self, last: bool = False) -> None:
        if not self._spec.tee:
            return
        lines = self._files.unseen(last)
        # Whoever pages through the output, or stops it by Ctrl-S, must not keep the launcher from its work.
        while (last or _terminal_takes_more()) and (line := next(lines, None)) is not None:
            self._say(line)

    def _pass_on(self, number: int) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(number)

    def _send(self, targets: tuple[int, ...], number: signal.Signals) -> None:
        """Send a signal to all processes of some ranks, and note that."""
        now = self._now()
        for rank in targets:
            signal_group(self._processes[rank].pid, number)
        ranks = tuple(_sent(state, number, now) if state.rank in targets else state for state in self._job.ranks)
        self._job = replace(self._job, ranks=ranks, stopped_at=self._job.stopped_at or now)


def _terminal_takes_more() -> bool:
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    return bool(poll.poll(0))


def _sent(state: RankState, number: int, now: float) -> RankState:
    received = (*state.received, number) if state.running else state.received
    killed_at = now if number == signal.SIGKILL else state.killed_at
    return replace(state, sent=(*state.sent, number), received=received, killed_at=killed_at)


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


def _stop_note_at(path: str) -> StopNote | None:
    """What a rank said about its stop; None where it said nothing yet, or is just writing."""
    try:
        with open(path) as file:
            return StopNote.from_json(file.read())
    except (OSError, ValueError):
        return None


def _interruption(request: Request, job: JobState) -> str:
    who = "1 rank" if len(job.ranks) == 1 else f"{len(job.ranks)} ranks"
    where = ""
    if request.machine != job.machine:
        where = f" on machine {request.machine} ({job.machines[request.machine].host})"
    if request.signal == signal.SIGINT and not where:
        return f"\nallstep: Ctrl-C: stopping {who} (press it again to be quicker)"
    name = "Ctrl-C" if request.signal == signal.SIGINT else signal.Signals(request.signal).name
    return f"allstep: {name}{where}: stopping {who}"
