"""The two requests to the Linux kernel that tie the life of processes together."""

import ctypes
import os
import signal

__all__ = ["adopt_orphans", "end_with_parent"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, process `parent`, ends, however that comes about."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request; the kernel will not tell us any more
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(adopt: bool = True) -> bool:
    """Become the parent of processes whose own parent below this one ends, so that their end is seen and reaped here.

    In a container without an init process nobody else would reap them. Returns what held before.
    """
    libc = ctypes.CDLL(None)
    before = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
    return bool(before.value)
