"""A launch in a folder of its own, for tests of what happens when something breaks."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from allstep.testing.processes import processes_with

PRELUDE = """
import os, signal, subprocess, sys, threading, time

rank = int(os.environ["RANK"])

def ready(pid=None):
    with open("ready", "w") as pipe:
        pipe.write(f"{rank} {pid or os.getpid()}\\n")

def ignore(*numbers):
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)

def block():
    while True:
        time.sleep(600)

"""

DEADLINE = 60.0
"""Seconds after which a test that waits gives up."""


class Launch:
    """One `allstep launch` in a folder of its own; all its processes carry a mark by which they are found."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder = folder
        self.mark = f"ALLSTEP_TEST_MARK={uuid.uuid4().hex}"
        (folder / "train.py").write_text(PRELUDE + textwrap.dedent(code))
        (folder / "temporary").mkdir()
        os.mkfifo(folder / "ready")
        self._ready = os.open(folder / "ready", os.O_RDWR | os.O_NONBLOCK)
        self._text = ""

    def start(
        self, *options: str, before: tuple[str, ...] = (), ranks: int = 2, script_args: tuple[str, ...] = (), **pipes
    ) -> None:
        name, value = self.mark.split("=")
        environment = {**os.environ, name: value, "TMPDIR": str(self.folder / "temporary")}
        program = [sys.executable, "-m", "allstep", "launch", "--nproc_per_node", str(ranks), *options]
        self.process = subprocess.Popen(
            [*before, *program, "train.py", *script_args],
            cwd=self.folder,
            env=environment,
            text=True,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes},
        )

    def ready(self, count: int) -> list[tuple[int, int]]:
        """Wait until `count` processes have said that they are ready; gives (rank, process) of each, by rank."""
        deadline = time.monotonic() + DEADLINE
        while self._text.count("\n") < count:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._ready], [], [], left)[0]:
                pytest.fail(f"only {self._text.splitlines()} became ready; {self.marked()} are there")
            self._text += os.read(self._ready, 65536).decode()
        lines = self._text.splitlines()
        self._text = ""
        return sorted((int(line.split()[0]), int(line.split()[1])) for line in lines)

    def end(self) -> tuple[int, str]:
        """Wait for the end; gives the exit status and what was printed to stderr."""
        self.output, self.errors = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, self.errors

    @staticmethod
    def report(errors: str) -> list[str]:
        """The final report: from the line that names the rank to the end."""
        lines = errors.rstrip("\n").split("\n")
        starts = [number for number, line in enumerate(lines) if line.startswith(("allstep: rank ", "allstep: machine "))]
        assert starts, errors
        return [line.strip() for line in lines[starts[-1] :]]

    def others(self) -> list[int]:
        """Its processes but for the launcher."""
        return [pid for pid in self.marked() if pid != self.process.pid]

    def gone(self) -> bool:
        """Wait until none of its processes is left; whether that came."""
        deadline = time.monotonic() + DEADLINE
        while self.marked() and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.marked()

    def marked(self) -> list[int]:
        """The processes of this launch that are there now."""
        return processes_with(self.mark)

    def close(self) -> None:
        os.close(self._ready)
        for pid in self.marked():
            os.kill(pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self.process.wait(timeout=DEADLINE)


@pytest.fixture
def launch(tmp_path):
    """Makes a launch of a script; ends what a failed test leaves of it."""
    launches = []

    def make(code: str, folder: str = ".") -> Launch:
        (tmp_path / folder).mkdir(exist_ok=True)
        launches.append(Launch(tmp_path / folder, code))
        return launches[-1]

    yield make
    for one in launches:
        one.close()
