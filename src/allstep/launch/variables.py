"""The environment of a rank: what its launcher adds to the variables of the user. Pure, but for `glibc_version`."""

import os
from collections.abc import Mapping

from allstep.launch.generation import Generation

__all__ = ["FAILURE_FILE", "LAUNCHER_PID", "STOP_FILE", "glibc_version", "job_variables", "steady_memory"]

FAILURE_FILE = "ALLSTEP_FAILURE_FILE"
"""Environment variable: where a failing rank writes its record."""
STOP_FILE = "ALLSTEP_STOP_FILE"
"""Environment variable: where a rank that was asked to stop says that it will, and later that it has."""
LAUNCHER_PID = "ALLSTEP_LAUNCHER_PID"
"""Environment variable: the process whose end is the end of the rank."""

_MIB = 1 << 20
_ANY_THRESHOLD = (2, 36)
"""glibc that was seen to take any mmap threshold. Older ones refuse more than 32 MiB, and then fall back to 128 KiB."""


def job_variables(
    variables: Mapping[str, str],
    *,
    generation: Generation,
    launcher_pid: int,
    threads: int | None,
    gpus: int,
    glibc: tuple[int, int] | None,
    interface: str | None = None,
) -> dict[str, str]:
    """What every rank of this host is given beside who it is; `variables` are the user's.

    Args:
        threads: OMP_NUM_THREADS; None leaves the user's.
        gpus: GPUs in sight; without one, ranks compute on the CPU.
        glibc: version of the C library; None for another one.
        interface: network interface by which other hosts are reached; None where there are none, or it is not known.
    """
    own = {
        "ALLSTEP_RUN_ID": generation.name,
        "ALLSTEP_RESTART_COUNT": str(generation.number),
        "ALLSTEP_MAX_RESTARTS": str(generation.max_restarts),
        "TORCHELASTIC_RESTART_COUNT": str(generation.number),
        "GROUP_RANK": str(generation.machine),
        "GROUP_WORLD_SIZE": str(len(generation.counts)),
        LAUNCHER_PID: str(launcher_pid),
        # Lines that a rank printed must not be lost when a signal ends it.
        "PYTHONUNBUFFERED": variables.get("PYTHONUNBUFFERED") or "1",
    }
    if interface is not None:
        # gloo otherwise takes the address that the host's own name stands for: often one that no other host can reach
        own["GLOO_SOCKET_IFNAME"] = variables.get("GLOO_SOCKET_IFNAME") or interface
    if threads is not None:
        own["OMP_NUM_THREADS"] = str(threads)
    if not gpus:
        # accelerate otherwise trains every rank by itself on such a machine, without a word
        own["ACCELERATE_USE_CPU"] = variables.get("ACCELERATE_USE_CPU") or "true"
        own |= steady_memory(variables, glibc)
    return own


def steady_memory(variables: Mapping[str, str], glibc: tuple[int, int] | None) -> dict[str, str]:
    """Settings by which glibc keeps freed memory for the next step, instead of giving it back and faulting it in anew.

    Nothing where the user set a `MALLOC_` variable, tunes malloc by GLIBC_TUNABLES, or loads another malloc.

    Args:
        glibc: version of the C library; None for another one, which has no such settings.
    """
    chosen = any(name.startswith("MALLOC_") for name in variables)
    tuned = "glibc.malloc." in variables.get("GLIBC_TUNABLES", "")
    replaced = "malloc" in variables.get("LD_PRELOAD", "")  # jemalloc, tcmalloc, mimalloc
    if glibc is None or chosen or tuned or replaced:
        return {}
    threshold = 1024 * _MIB if glibc >= _ANY_THRESHOLD else 32 * _MIB
    return {"MALLOC_MMAP_THRESHOLD_": str(threshold), "MALLOC_TRIM_THRESHOLD_": str(1024 * 1024 * _MIB)}


def glibc_version() -> tuple[int, int] | None:
    """Version of the C library of this process, where it is glibc."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor = version.split(".")[:2]
        return (int(major), int(minor)) if name == "glibc" else None
    except (ValueError, OSError):  # a library that does not know the name, or names itself otherwise
        return None
