"""One launch from its start to its end: generation after generation, until one needs no restart or may have none.

The ranks start before anything is imported that is not needed to start them: what watches over them is in `watch.py`. Each
rank leads a session and so a process group of its own, by which the processes that it starts are reached too.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from allstep.errors import ArgumentsError
from allstep.launch.generation import Generation
from allstep.launch.guardian import end_marked
from allstep.launch.linux import adopt_orphans
from allstep.launch.logs import RankFiles
from allstep.launch.memory import oom_kills
from allstep.launch.party import Alone, Party, Stopped
from allstep.launch.signals import Signals
from allstep.launch.spec import LaunchSpec
from allstep.launch.start import Guardian, end_at_once, start_ranks

if TYPE_CHECKING:
    from allstep.launch.result import LaunchResult

__all__ = ["launch"]

FIRST_SLEEP = 2.0
"""Seconds in which the ranks have the cores to themselves, unless something happens."""
LEFTOVERS = 2.0
"""Seconds that ending those gets who left the sessions of their ranks."""


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
        ArgumentsError: a port is taken, the folder for the output cannot be written to, a rank cannot be started, or the
            launchers of several hosts do not come together. No process is left.
        ValueError: this is not the main thread.
    """
    started_at = time.time()
    say = say or _to_stderr
    with Signals() as signals, _orphans_adopted():
        party = _party(spec, signals, say)
        try:
            result = _Launch(spec, os.environ if variables is None else variables, say, signals, party).run(started_at)
        except Stopped as stopped:
            party.close("it was asked to stop")
            return _stopped(stopped.signal, started_at)
        except BaseException as error:
            party.close(str(error) if isinstance(error, ArgumentsError) else f"{type(error).__name__}: {error}")
            raise
        party.close()
        return result


class _Launch:
    """One launch in progress."""

    def __init__(
        self,
        spec: LaunchSpec,
        variables: Mapping[str, str],
        say: Callable[[str], None],
        signals: Signals,
        party: Party,
    ) -> None:
        self._spec = spec
        self._variables = variables
        self._say = say
        self._signals = signals
        self._party = party
        self._processes: list[subprocess.Popen[bytes]] = []
        self._guardian: Guardian | None = None

    def run(self, started_at: float) -> "LaunchResult":
        """Start generations until one is the last."""
        generation = self._party.begin()
        files = RankFiles(self._spec.log_dir)
        try:
            return self._generations(generation, files, started_at)
        except BaseException:
            end_at_once(self._processes)
            end_marked(files.private, LEFTOVERS)
            files.finish(keep=False)
            raise
        finally:
            if self._guardian is not None:
                self._guardian.close()

    def _generations(self, generation: Generation, files: RankFiles, started_at: float) -> "LaunchResult":
        earlier: list[str] = []
        while True:
            result, again = self._one(generation, files, started_at)
            if result.exit_code != 0:
                _reap(end_marked(files.private, LEFTOVERS))
            if not again:
                from dataclasses import replace

                return replace(result, earlier=tuple(earlier), logs=files.finish(keep=result.exit_code != 0))
            from allstep.launch.failures import cause

            earlier.append(f"restart {generation.number + 1} of {generation.max_restarts}: {cause(result)}")
            self._say(f"allstep: {earlier[-1]}")
            files.forget()
            generation = self._party.begin()

    def _one(self, generation: Generation, files: RankFiles, started_at: float) -> "tuple[LaunchResult, bool]":
        """Run one generation; how it ended, and whether another one follows."""
        self._processes.clear()
        memory = oom_kills()
        start_ranks(self._spec, self._variables, generation, files, self._say, self._processes, self._party.interface())
        if self._guardian is None:
            self._guardian = Guardian(files.private)
        self._signals.wait(FIRST_SLEEP, self._party.sockets())
        # The ranks are busy importing what they need, and would have to wait for a core while this is read.
        from allstep.launch.watch import watch

        result = watch(
            self._processes,
            spec=self._spec,
            generation=generation,
            party=self._party,
            files=files,
            signals=self._signals,
            say=self._say,
            started_at=started_at,
            oom_kills_before=memory,
        )
        return self._party.settle(result, result.calls_for_restart and generation.number < generation.max_restarts)


def _party(spec: LaunchSpec, signals: Signals, say: Callable[[str], None]) -> Party:
    if spec.num_machines == 1:
        return Alone(spec)
    if spec.machine_rank == 0:
        from allstep.launch.first import First

        return First(spec, signals, say)
    from allstep.launch.other import Other

    return Other(spec, signals)


def _stopped(number: int, started_at: float) -> "LaunchResult":
    from allstep.launch.result import LaunchResult

    return LaunchResult.before_any_rank(number, host=os.uname().nodename, started_at=started_at, ended_at=time.time())


def _reap(ended: list[int]) -> None:
    """Nobody else would, in a container without an init process: their own parents have ended, and they are ours now."""
    for pid in ended:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


@contextlib.contextmanager
def _orphans_adopted() -> Iterator[None]:
    before = adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(before)


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed pipe must not keep ranks from being stopped
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
