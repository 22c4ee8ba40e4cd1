"""What this machine, this Python and this environment are, read without torch. Nothing in here judges."""

import fcntl
import importlib.metadata
import os
import platform
import resource
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import allstep
from allstep.devices import KINDS, kind_here
from allstep.environment import WorkerEnvironment
from allstep.errors import AllstepError
from allstep.launch.ports import HeldPort
from allstep.launch.spec import cores_available, visible_gpus

__all__ = ["launcher_facts", "machine_facts", "network_facts", "software_facts"]

OPTIONAL = ("transformers", "accelerate", "datasets", "tensorboard", "matplotlib", "PyYAML", "cloudpickle")
REQUIRED = ("torch", "numpy", "safetensors", "tqdm", "click")

_PREFIXES = ("ALLSTEP_", "TORCHELASTIC_", "ACCELERATE_", "PET_", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "MV2_COMM_WORLD_")
_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
_NAMES |= {kind.visible for kind in KINDS if kind.visible} | {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
_OF_SLURM = "JOB_ID JOB_NODELIST NTASKS STEP_ID STEP_NODELIST STEP_NUM_TASKS STEP_TASKS_PER_NODE PROCID LOCALID NODEID PTY_PORT"
_NAMES |= {f"SLURM_{name}" for name in _OF_SLURM.split()}  # of some forty

_SIOCGIFADDR = 0x8915
_LOOKUP_SECONDS = 5.0


def software_facts() -> dict[str, Any]:
    """Versions of Python, allstep and the packages it can use; None for those that are not there."""
    return {
        "allstep": allstep.__version__,
        "allstep_at": str(Path(__file__).parents[2]),
        "python": platform.python_version(),
        "python_at": sys.executable,
        "required": {name: _version(name) for name in REQUIRED},
        "optional": {name: _version(name) for name in OPTIONAL},
    }


def machine_facts(root: str = "") -> dict[str, Any]:
    """Cores, memory, shared memory and limits; sizes in bytes, None for what is unlimited or not known.

    Args:
        root: where /proc and /dev are looked for.
    """
    return {
        "host": socket.gethostname(),
        "system": _system(),
        "cores": os.cpu_count(),
        "cores_affinity": len(os.sched_getaffinity(0)),
        "cores_job": cores_available(),
        "device": kind_here().name,
        "devices_visible": visible_gpus(os.environ),
        "memory": _memory(root),
        "shm": _space(f"{root}/dev/shm"),
        "limits": {
            name: _limit(number)
            for name, number in (
                ("nofile", resource.RLIMIT_NOFILE),
                ("nproc", resource.RLIMIT_NPROC),
                ("memlock", resource.RLIMIT_MEMLOCK),
                ("core", resource.RLIMIT_CORE),
            )
        },
    }


def network_facts() -> dict[str, Any]:
    """Interfaces with their addresses, what names stand for, and whether a port can be had."""
    host = socket.gethostname()
    try:
        with HeldPort() as held:
            port, port_error = held.port, None
    except AllstepError as error:
        port, port_error = None, str(error)
    return {
        "interfaces": interfaces(),
        "localhost": _resolved("localhost"),
        "hostname": host,
        "hostname_is": _resolved(host),
        "free_port": port,
        "free_port_error": port_error,
    }


def launcher_facts(variables: Mapping[str, str]) -> dict[str, Any]:
    """The variables of launchers that are set, and what a rank would make of them."""
    seen = {name: value for name, value in sorted(variables.items()) if name in _NAMES or name.startswith(_PREFIXES)}
    try:
        environment, error = WorkerEnvironment.from_variables(variables), None
    except AllstepError as caught:
        environment, error = None, str(caught)
    return {
        "variables": seen,
        "world_size": environment.world_size if environment else None,
        "rank": environment.rank if environment else None,
        "launcher": environment.launcher if environment else None,
        "error": error,
    }


def interfaces() -> dict[str, list[str]]:
    """Name of each network interface → its addresses."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name, addresses in found.items():
            try:
                reply = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(reply[20:24]))
            except OSError:  # it has none of this family
                continue
    try:
        with open("/proc/net/if_inet6") as file:
            lines = [line.split() for line in file]
    except OSError:
        lines = []
    for number, *_, name in lines:
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        name = platform.system()
    return f"{name}, {platform.system()} {platform.release()}, {platform.machine()}"


def _memory(root: str) -> dict[str, int | None]:
    try:
        with open(f"{root}/proc/meminfo") as file:
            sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in file}
    except (OSError, ValueError, IndexError):
        sizes = {}
    return {"total": sizes.get("MemTotal"), "available": sizes.get("MemAvailable")}


def _space(folder: str) -> dict[str, Any] | None:
    """Size and free bytes of the file system at `folder`; None where it is not there."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return {"size": size, "free": free, "writable": os.access(folder, os.W_OK)}


def _limit(number: int) -> dict[str, int | None]:
    soft, hard = resource.getrlimit(number)
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in (("soft", soft), ("hard", hard))}


def _resolved(name: str) -> list[str] | None:
    """The addresses that `name` stands for; None where it stands for none, or nobody answers in time."""
    found: list[str] = []

    def look_up() -> None:
        try:
            found.extend(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None)))
        except OSError:
            return

    thread = threading.Thread(target=look_up, daemon=True)  # a name server that is gone can take minutes
    thread.start()
    thread.join(_LOOKUP_SECONDS)
    return list(found) or None
