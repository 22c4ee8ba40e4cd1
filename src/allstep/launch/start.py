"""Starts the ranks of one generation on this host, and the guardian that outlives their launcher."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping

from allstep.errors import ArgumentsError
from allstep.launch.generation import Generation
from allstep.launch.logs import RankFiles
from allstep.launch.signals import signal_group
from allstep.launch.spec import LaunchSpec, cores_available, threads_per_rank, visible_gpus
from allstep.launch.variables import FAILURE_FILE, STOP_FILE, glibc_version, job_variables
from allstep.words import ranks_in_words

__all__ = ["Guardian", "end_at_once", "start_ranks"]

Process = subprocess.Popen[bytes]


def start_ranks(
    spec: LaunchSpec,
    variables: Mapping[str, str],
    generation: Generation,
    files: RankFiles,
    say: Callable[[str], None],
    processes: list[Process],
    interface: str | None,
) -> None:
    """Start the ranks of this host, one after the other into `processes`.

    Args:
        variables: the user's environment.
        interface: network interface by which other hosts are reached.

    Raises:
        ArgumentsError: one cannot be started; those before it run.
    """
    variables = {**variables, **dict(spec.env)}
    threads = threads_per_rank(cores_available(), spec.num_processes, variables, spec.num_cpu_threads_per_process)
    own = job_variables(
        variables,
        generation=generation,
        launcher_pid=os.getpid(),
        threads=threads,
        gpus=visible_gpus(variables),
        glibc=glibc_version(),
        interface=interface,
    )
    say(_introduction(generation, threads, files))
    for rank in generation.here:
        try:
            processes.append(_start_rank(spec, rank, generation, {**variables, **own}, files))
        except OSError as error:
            raise ArgumentsError(
                f"Rank {rank} of {generation.world_size} could not be started: {error.strerror}. Where this machine has "
                "no more processes or memory to give, ask for fewer ranks with --num_processes."
            ) from error


def _start_rank(spec: LaunchSpec, rank: int, generation: Generation, variables: Mapping[str, str], files: RankFiles) -> Process:
    own = {FAILURE_FILE: files.failure(rank), STOP_FILE: files.stop(rank)}
    variables = {**variables, **generation.worker(rank).variables(), **own}
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


def end_at_once(processes: list[Process]) -> None:
    """Leave no process behind, whatever made the launcher itself fail."""
    for process in processes:
        if process.returncode is None:
            signal_group(process.pid, signal.SIGKILL)
            process.wait()


class Guardian:
    """A process that waits for the end of this one, and then ends what the ranks started (`guardian.py`)."""

    def __init__(self, folder: str) -> None:
        """Start it for the launch with the private `folder`. Of what is open here it gets its end of a pipe, nothing else."""
        program = os.path.join(os.path.dirname(__file__), "guardian.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", program, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            start_new_session=True,  # Ctrl-C at the terminal is not for it
        )

    def close(self) -> None:
        """The launch has ended in order."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def _introduction(generation: Generation, threads: int | None, files: RankFiles) -> str:
    count, here, hosts = generation.world_size, generation.here, len(generation.counts)
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    place = f"on {generation.master_addr}:{generation.master_port}"
    if hosts > 1:
        place = f"of {hosts} machines {place}, {ranks_in_words(here)} on this one (machine {generation.machine})"
    each = "" if threads is None else f", {threads} thread{'s' if threads > 1 else ''} each"
    filed = range(max(1, here.start), here.stop)  # rank 0 has the terminal
    output = ""
    if filed:
        path = files.log(filed.start)
        output = f"; output of {ranks_in_words(filed)}: {path if len(filed) == 1 else os.path.dirname(path)}"
    return f"allstep: {ranks} {place}{each}{output}"
