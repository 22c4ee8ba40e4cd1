"""Finding the processes that a test has started, also those that it does not know: by a variable in their environment."""

import os
from pathlib import Path

__all__ = ["processes_with"]


def processes_with(variable: str) -> list[int]:
    """The processes that are there now and have `variable`, "NAME=value", in the environment that they were started with."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                variables = Path("/proc", entry, "environ").read_bytes().split(b"\0")
            except OSError:  # ended meanwhile, or somebody else's
                continue
            if variable.encode() in variables:
                found.append(int(entry))
    return found
