"""Ends what a launcher leaves behind that was itself killed: its ranks, and all processes that they started.

The launcher starts this file as a process of its own, `python -I -S guardian.py FOLDER`, and holds a pipe to it. When the
launcher ends without a word, the kernel closes the pipe. Ranks are killed by the kernel at that moment, but what they started
is not, and may have left their sessions. It is found by its environment: no other process knows the folder of the launch.

Imports nothing else, so that it starts in a hundredth of a second beside the ranks.
"""

import os
import signal
import sys
import time

__all__ = ["end_marked", "main", "marked"]

MARK = b"ALLSTEP_FAILURE_FILE="
"""Variable of every rank, and so of what it starts, whose value begins with the folder of the launch."""
PATIENCE = 10.0
"""Seconds in which killed processes should be gone; one that waits for a disk is not."""


def end_marked(folder: str, patience: float = PATIENCE) -> list[int]:
    """Kill every process that knows `folder`, until none is left or `patience`, in seconds, has run out; returns whom."""
    deadline = time.monotonic() + patience
    killed = set()
    while (found := marked(folder)) and time.monotonic() < deadline:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it ended meanwhile, or became somebody else's
                continue
            killed.add(pid)
        time.sleep(0.01)  # it ends in its own time, and whom it started meanwhile is found next
    return sorted(killed - set(found))


def marked(folder: str) -> list[int]:
    """The processes of a launch that are there: those started with its `folder` in their environment, but for this one."""
    mark = MARK + os.fsencode(os.path.join(folder, ""))
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    variables = file.read()
            except OSError:  # it ended meanwhile, or is somebody else's
                continue
            if variables.startswith(mark) or b"\0" + mark in variables:
                found.append(int(entry))
    return found


def main() -> None:
    """Wait for the end of the launcher, and clear up behind it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    end_marked(sys.argv[1])


if __name__ == "__main__":
    main()
