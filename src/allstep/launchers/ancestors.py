"""The processes above this one: what they run, as Linux tells it in /proc."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Process", "ancestors", "pid_of_ancestor"]

MOST = 6
"""How far up to look: wrappers such as `numactl` and shells lie between a rank and its launcher, but not many."""


@dataclass(frozen=True)
class Process:
    """One process."""

    pid: int
    command: tuple[str, ...]
    """Its command line; empty for what is hidden or belongs to the kernel."""


def ancestors(most: int = MOST, root: str = "") -> Iterator[Process]:
    """The processes above this one, nearest first, as far as they can be read.

    Args:
        most: how many at most.
        root: where /proc is looked for.
    """
    pid = os.getppid()
    for _ in range(most):
        if pid <= 0:
            return
        try:
            with open(f"{root}/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").split("\0")[:-1]
            with open(f"{root}/proc/{pid}/stat") as file:
                # the name in brackets may have spaces and brackets of its own
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return
        yield Process(pid, tuple(words))
        pid = parent


def pid_of_ancestor(program: str) -> int | None:
    """Process id of the nearest process above this one that runs `program`; None where there is none."""
    return next((one.pid for one in ancestors() if one.command and os.path.basename(one.command[0]) == program), None)
