"""Starts the ranks of a launch, and stays with them until the last of their processes has ended.

The ranks start before anything is imported that is not needed to start them: what watches over them is in `watch.py`. Each
rank leads a session and so a process group of its own, by which the processes that it starts are reached too.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from allstep.environment import WorkerEnvironment
from allstep.errors import ArgumentsError
from allstep.launch.linux import adopt_orphans
from allstep.launch.logs import RankFiles
from allstep.launch.ports import HeldPort
from allstep.launch.signals import Signals, signal_group
from allstep.launch.spec import LaunchSpec, cores_available, threads_per_rank, visible_gpus
from allstep.launch.variables import FAILURE_FILE, glibc_version, job_variables

if TYPE_CHECKING:
    from allstep.launch.failures import LaunchResult

__all__ = ["launch"]

HOST = "127.0.0.1"
FIRST_SLEEP = 2.0
"""Seconds in which the ranks have the cores to themselves, unless something happens."""


def launch(
    spec: LaunchSpec,
    *,
    variables: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> "LaunchResult":
    """Run `spec` and return when none of its processes is left. Call it from the main thread: it handles signals.

    Args:
        variables: environment of the ranks, to which theirs are added; None takes that of this process.
        say: gets the few lines that tell what goes on; None prints them to stderr.

    Raises:
        ArgumentsError: the port is taken, the folder for the output cannot be written to, or a rank cannot be started. No
            process is left.
        ValueError: this is not the main thread.
    """
    started_at = time.time()
    variables, say = {**(os.environ if variables is None else variables), **dict(spec.env)}, say or _to_stderr
    processes: list[subprocess.Popen[bytes]] = []
    with HeldPort(spec.main_process_port) as held, Signals() as signals, _orphans_adopted():
        files = RankFiles(spec.log_dir)
        try:
            _start(spec, variables, held.port, files, say, processes)
            signals.wait(FIRST_SLEEP)
            # The ranks are busy importing what they need, and would have to wait for a core while this is read.
            from allstep.launch.watch import watch

            return watch(
                processes, grace_period=spec.grace_period, files=files, signals=signals, say=say, started_at=started_at
            )
        except BaseException:
            _end_at_once(processes)
            files.finish(keep=False)
            raise


def _start(
    spec: LaunchSpec,
    variables: Mapping[str, str],
    port: int,
    files: RankFiles,
    say: Callable[[str], None],
    processes: list[subprocess.Popen[bytes]],
) -> None:
    """Start the ranks, one after the other into `processes`."""
    threads = threads_per_rank(cores_available(), spec.num_processes, variables, spec.num_cpu_threads_per_process)
    own = job_variables(
        variables,
        run_id=os.urandom(16).hex(),
        launcher_pid=os.getpid(),
        threads=threads,
        gpus=visible_gpus(variables),
        glibc=glibc_version(),
    )
    say(_introduction(spec, port, threads, files))
    for rank in range(spec.num_processes):
        try:
            processes.append(_start_rank(spec, rank, port, {**variables, **own}, files))
        except OSError as error:
            raise ArgumentsError(
                f"Rank {rank} of {spec.num_processes} could not be started: {error.strerror}. Where this machine has "
                "no more processes or memory to give, ask for fewer ranks with --num_processes."
            ) from error


def _start_rank(
    spec: LaunchSpec, rank: int, port: int, variables: Mapping[str, str], files: RankFiles
) -> subprocess.Popen[bytes]:
    worker = WorkerEnvironment(
        rank=rank,
        world_size=spec.num_processes,
        local_rank=rank,
        local_world_size=spec.num_processes,
        master_addr=HOST,
        master_port=port,
    )
    variables = {**variables, **worker.variables(), FAILURE_FILE: files.failure(rank)}
    command = spec.command(sys.executable)
    if rank == 0:
        return subprocess.Popen(command, env=variables, start_new_session=True)
    output = files.open_log(rank)
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


def _end_at_once(processes: list[subprocess.Popen[bytes]]) -> None:
    """Leave no process behind, whatever made the launcher itself fail."""
    for process in processes:
        if process.returncode is None:
            signal_group(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _orphans_adopted() -> Iterator[None]:
    before = adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(before)


def _introduction(spec: LaunchSpec, port: int, threads: int | None, files: RankFiles) -> str:
    count = spec.num_processes
    each = "" if threads is None else f", {threads} thread{'s' if threads > 1 else ''} each"
    output = {1: "", 2: f"; output of rank 1: {files.log(1)}"}.get(
        count, f"; output of ranks 1-{count - 1}: {os.path.dirname(files.log(1))}"
    )
    return f"allstep: {'1 rank' if count == 1 else f'{count} ranks'} on {HOST}:{port}{each}{output}"


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed pipe must not keep ranks from being stopped
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
