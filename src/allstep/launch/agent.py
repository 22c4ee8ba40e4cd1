"""Starts the ranks of a launch and stays with them until the last of their processes has ended.

One loop: see what happened, ask `decide` what to do, do it, sleep until a signal comes. A child's end is such a signal.
Each rank leads a session and so a process group of its own, by which the processes that it starts are reached too.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from allstep.environment import WorkerEnvironment
from allstep.errors import ArgumentsError
from allstep.launch.decide import Finish, Forward, JobState, Kill, RankState, Request, Stop, Wait, decide
from allstep.launch.failures import LaunchResult
from allstep.launch.linux import adopt_orphans
from allstep.launch.logs import RankFiles
from allstep.launch.ports import HeldPort
from allstep.launch.record import FailureRecord
from allstep.launch.signals import Signals
from allstep.launch.spec import LaunchSpec, cores_available, threads_per_rank, visible_gpus
from allstep.launch.worker import FAILURE_FILE, LAUNCHER_PID

__all__ = ["launch"]

HOST = "127.0.0.1"
LONGEST_SLEEP = 1.0
"""Seconds after which a sleeping launcher looks for failure records: a rank may fail and then hang on its way out."""


def launch(
    spec: LaunchSpec,
    *,
    variables: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> LaunchResult:
    """Run `spec` and return when none of its processes is left. Call it from the main thread: it handles signals.

    Args:
        variables: environment of the ranks, to which theirs are added; None takes that of this process.
        say: gets the few lines that tell what goes on; None prints them to stderr.

    Raises:
        ArgumentsError: the port is taken, the folder for the output cannot be written to, or a rank cannot be started. No
            process is left.
        ValueError: this is not the main thread.
    """
    variables = os.environ if variables is None else variables
    with HeldPort(spec.main_process_port) as held, Signals() as signals, _orphans_adopted():
        files = RankFiles(spec.log_dir)
        agent = _Agent(spec, variables, held.port, files, signals, say or _to_stderr)
        try:
            return agent.run()
        except BaseException:
            agent.end_at_once()
            files.finish(keep=False)
            raise


class _Agent:
    """One launch in progress."""

    def __init__(
        self,
        spec: LaunchSpec,
        variables: Mapping[str, str],
        port: int,
        files: RankFiles,
        signals: Signals,
        say: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._variables = variables
        self._port = port
        self._files = files
        self._signals = signals
        self._say = say
        self._clock = time.time() - time.monotonic()  # waiting must not depend on who sets the clock meanwhile
        self._processes: list[subprocess.Popen[bytes]] = []
        self._job = JobState(ranks=(), grace_period=spec.grace_period)

    def run(self) -> LaunchResult:
        started_at = self._now()
        self._start()
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

    def end_at_once(self) -> None:
        """Leave no process behind, whatever made the launcher itself fail."""
        for process in self._processes:
            if process.returncode is None:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()

    def _start(self) -> None:
        spec = self._spec
        threads = threads_per_rank(cores_available(), spec.num_processes, self._variables, spec.num_cpu_threads_per_process)
        own = {
            "ALLSTEP_RUN_ID": os.urandom(16).hex(),
            LAUNCHER_PID: str(os.getpid()),
            # Lines that a rank printed must not be lost when a signal ends it.
            "PYTHONUNBUFFERED": self._variables.get("PYTHONUNBUFFERED") or "1",
        }
        if threads is not None:
            own["OMP_NUM_THREADS"] = str(threads)
        if not visible_gpus(self._variables):
            # accelerate otherwise trains every rank by itself on such a machine, without a word
            own["ACCELERATE_USE_CPU"] = self._variables.get("ACCELERATE_USE_CPU") or "true"
        self._say(_introduction(spec, self._port, threads, self._files))
        for rank in range(spec.num_processes):
            try:
                self._processes.append(self._start_rank(rank, own))
            except OSError as error:
                raise ArgumentsError(
                    f"Rank {rank} of {spec.num_processes} could not be started: {error.strerror}. Where this machine has "
                    "no more processes or memory to give, ask for fewer ranks with --num_processes."
                ) from error
        self._job = replace(
            self._job, ranks=tuple(RankState(rank=rank, pid=one.pid) for rank, one in enumerate(self._processes))
        )

    def _start_rank(self, rank: int, own: Mapping[str, str]) -> subprocess.Popen[bytes]:
        count = self._spec.num_processes
        worker = WorkerEnvironment(
            rank=rank,
            world_size=count,
            local_rank=rank,
            local_world_size=count,
            master_addr=HOST,
            master_port=self._port,
        )
        variables = {**self._variables, **own, **worker.variables(), FAILURE_FILE: self._files.failure(rank)}
        command = self._spec.command(sys.executable)
        if rank == 0:
            return subprocess.Popen(command, env=variables, start_new_session=True)
        output = self._files.open_log(rank)
        try:
            return subprocess.Popen(
                command,
                env=variables,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        finally:
            os.close(output)

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
            _signal_group(self._job.ranks[rank].pid, number)
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


@contextlib.contextmanager
def _orphans_adopted() -> Iterator[None]:
    before = adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(before)


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


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


def _introduction(spec: LaunchSpec, port: int, threads: int | None, files: RankFiles) -> str:
    each = "" if threads is None else f", {threads} thread{'s' if threads > 1 else ''} each"
    count = spec.num_processes
    output = {1: "", 2: f"; output of rank 1: {files.log(1)}"}.get(
        count, f"; output of ranks 1-{count - 1}: {os.path.dirname(files.log(1))}"
    )
    return f"allstep: {_ranks(count)} on {HOST}:{port}{each}{output}"


def _interruption(number: int, count: int) -> str:
    if number == signal.SIGINT:
        return f"\nallstep: Ctrl-C: stopping {_ranks(count)} (press it again to be quicker)"
    return f"allstep: {signal.Signals(number).name}: stopping {_ranks(count)}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed pipe must not keep ranks from being stopped
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
