"""What the cores of this machine do beside the benchmark: read from the kernel, and waited for."""

import os
import time
from pathlib import Path

from allstep.cli.bench.blocks import foreign_share
from allstep.launch.spec import cores_available

__all__ = ["TICK", "Patience", "Watch", "busy_seconds"]

TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds in which the kernel counts what cores do."""
SAMPLE = 0.05
"""Seconds for which the cores are looked at to see whether they are idle."""
LONGEST_WAIT = 3.0
"""Seconds of waiting before one block."""


def busy_seconds(line: str | None = None) -> float:
    """Seconds for which cores were busy since the machine started, all together, with what a hypervisor gave to others.

    Args:
        line: first line of /proc/stat; None reads it. 0 where the kernel does not tell.
    """
    if line is None:
        try:
            line = Path("/proc/stat").read_text().split("\n", 1)[0]
        except OSError:
            return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) * TICK


class Patience:
    """Waits for idle cores, for so many seconds in all."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def wait(self) -> None:
        """Return when the machine does next to nothing, or when patience is at its end."""
        deadline = time.monotonic() + min(self.left, LONGEST_WAIT)
        while (began := time.monotonic()) < deadline:
            before = busy_seconds()
            time.sleep(SAMPLE)
            if busy_seconds() - before <= 2 * TICK:
                return
            self.left -= time.monotonic() - began


class Watch:
    """What others took of the cores while child processes of this one ran.

    with Watch() as watch:
        subprocess.run(...)
    watch.foreign
    """

    foreign = 0.0
    """Share of the cores' time, 0 to 1."""

    def __enter__(self) -> "Watch":
        self._began, self._own, self._busy = time.monotonic(), _own_seconds(), busy_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        self.foreign = foreign_share(
            busy=busy_seconds() - self._busy,
            own=_own_seconds() - self._own,
            wall=time.monotonic() - self._began,
            cores=cores_available(),
            tick=TICK,
        )


def _own_seconds() -> float:
    """CPU seconds of this process and of all its descendants that have ended."""
    return sum(os.times()[:4])
