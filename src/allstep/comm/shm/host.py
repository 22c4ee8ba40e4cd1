"""Which processes can share memory: asked of the kernel, not believed from variables."""

import os
import platform
from functools import cache

__all__ = ["host_key", "why_not_here"]

_NAMESPACES = ("pid", "ipc", "net", "uts")
_STRONGLY_ORDERED = ("x86_64", "AMD64", "i686")


@cache
def host_key() -> str:
    """The same in processes that run under one kernel and in the same namespaces, and in no others."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in _NAMESPACES)])


def why_not_here() -> str:
    """Why this process cannot share memory with any other in this way; empty where it can."""
    if platform.machine() not in _STRONGLY_ORDERED:
        # Other processors may show a counter's new value before the data that was written ahead of it.
        return f"processors of type {platform.machine()} do not keep the order of writes to memory"
    for name in ("memfd_create", "pidfd_open", "sched_yield"):
        if not hasattr(os, name):
            return f"this system or Python has no os.{name}"
    try:
        host_key()
        os.close(os.memfd_create("allstep"))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"the kernel refuses: {error}"
    return ""
