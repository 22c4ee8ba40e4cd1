"""Join and leave: from `WorkerEnvironment` to a joined torch process group and a `World` that says who we are."""

import atexit
import json
import os
import socket
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from allstep.comm.communicator import let_go_of_groups
from allstep.comm.shm import ShmProcessGroup
from allstep.comm.store import open_store
from allstep.comm.watchdog import start_watchdog, stop_watchdog
from allstep.devices import KINDS, native_backends
from allstep.environment import WorkerEnvironment
from allstep.errors import BackendError, CollectiveError, LaunchVariablesError
from allstep.launchers.undistributed import check_alone

__all__ = [
    "DEFAULT_TIMEOUT",
    "World",
    "available_backends",
    "backend_in_use",
    "choose_backend",
    "choose_device",
    "is_joined",
    "join",
    "leave",
]

DEFAULT_TIMEOUT = timedelta(seconds=1800)
"""For joining and for every collective, where nobody says otherwise."""

NATIVE_BACKEND = native_backends()
"""The backend made for each kind of device; on the CPU it is shm where all ranks are on one host."""

KNOWN_BACKENDS = ("gloo", "shm", *(kind.backend for kind in KINDS if kind.name != "cpu"), "mpi", "ucc")


@dataclass(frozen=True, kw_only=True)
class World:
    """Who this process is in its job, after joining."""

    rank: int
    """Number of this process in the job."""
    size: int
    """Number of processes in the job."""
    local_rank: int
    """Number of this process on its host."""
    local_size: int
    """Number of processes of the job on this host."""
    host: str
    """Name of this host."""
    device: str
    """Device of this process: "cpu", or for example "cuda:1"."""
    backend: str
    """Backend of the process group; "none" in a world of one."""
    launcher: str
    """Who started this process (see `WorkerEnvironment.launcher`)."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def to_json(self) -> str:
        """One line of JSON; `World(**json.loads(line))` gives the same object."""
        return json.dumps(asdict(self))


def join(
    *,
    backend: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    use_cpu: bool = False,
    environment: WorkerEnvironment | None = None,
    wait_warning: float = 60.0,
) -> World:
    """Join the job that this process was started for, once; with no launcher, or one process, there is nothing to join.

    A default group that exists already, made by the user, is kept and gets `timeout`.

    Args:
        backend: name of a torch.distributed backend; None takes the one made for the device (see `NATIVE_BACKEND`). Ranks that
            were started on one host and cannot share memory go over gloo, and the first one says so.
        timeout: for joining and for every collective of the group.
        use_cpu: keep off accelerators.
        environment: who this process is; None reads the launcher's variables.
        wait_warning: seconds that a rank waits for others before a person is told who is late; 0: not before the timeout.

    Raises:
        LaunchVariablesError: the variables are half set or contradict one another, give a rank a device or a port that cannot
            be, or this process is alone where `accelerate launch` was asked for several.
        BackendError: `backend` is not there, in this torch or on this machine.
        CollectiveError: the other ranks did not come within `timeout`.
    """
    joined = is_joined()
    if environment is None:
        environment = WorkerEnvironment.from_variables(os.environ)
        if not joined:
            check_alone(environment, os.environ)
    if joined and not environment.is_launched:
        environment = _environment_of_default_group(environment)
    device = choose_device(environment, use_cpu=use_cpu or environment.use_cpu)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    if joined:
        dist.distributed_c10d._set_pg_timeout(timeout)
    elif environment.world_size > 1 or backend is not None:
        one_host = environment.local_world_size == environment.world_size
        backend = choose_backend(backend, device.type, one_host=one_host)
        if environment.world_size > 1:
            _initialize(environment, backend, device, timeout)
            joined = True
    if joined and dist.get_world_size() > 1:
        start_watchdog(dist.group.WORLD, dist.distributed_c10d._get_default_store(), warn_after=wait_warning)
    return World(
        rank=dist.get_rank() if joined else 0,
        size=dist.get_world_size() if joined else 1,
        local_rank=environment.local_rank,
        local_size=environment.local_world_size,
        host=socket.gethostname(),
        device=str(device),
        backend=backend_in_use() if joined else "none",
        launcher=environment.launcher,
    )


def _environment_of_default_group(environment: WorkerEnvironment) -> WorkerEnvironment:
    """Who this process is where the user made the default group without any launcher: ranks of one host, device by device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    devices = torch.accelerator.device_count() or size
    return replace(environment, rank=rank, world_size=size, local_rank=rank % devices, local_world_size=min(size, devices))


def is_joined() -> bool:
    """Whether this process has a default process group, by `join` or by its own call of torch."""
    return dist.is_available() and dist.is_initialized()


def leave() -> None:
    """Leave the default process group, if there is one. Called at exit by itself where `join` made the group."""
    stop_watchdog()
    let_go_of_groups()
    if is_joined():
        dist.destroy_process_group()


def choose_device(environment: WorkerEnvironment, *, use_cpu: bool) -> torch.device:
    """This rank's own device: the accelerator numbered like its local rank, or the CPU where there is none.

    Raises:
        LaunchVariablesError: more ranks on this host than devices.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if use_cpu or accelerator is None or accelerator.type not in NATIVE_BACKEND:
        return torch.device("cpu")
    devices = torch.accelerator.device_count()
    if environment.local_rank >= devices:
        raise LaunchVariablesError(
            f"Rank {environment.rank} has LOCAL_RANK={environment.local_rank}, but this host shows {devices} "
            f"{accelerator.type} device(s), one for each rank. Start at most {devices} ranks here, or train on the CPU "
            f"with use_cpu=True."
        )
    return torch.device(accelerator.type, environment.local_rank)


def available_backends() -> list[str]:
    """Backends that this torch has and for which this machine has the device."""
    return [name for name in KNOWN_BACKENDS if _is_available(name)]


def backend_in_use() -> str:
    """Name of the backend of the default group; gloo where ranks that were to share memory cannot."""
    group = dist.group.WORLD
    return "gloo" if isinstance(group, ShmProcessGroup) and group.peers is None else dist.get_backend()


def choose_backend(asked: str | None, device_type: str, *, one_host: bool = False) -> str:
    """The backend to use for tensors of `device_type`: the one asked for, or the one made for that device.

    Args:
        asked: its name; None for the one made for the device.
        device_type: for example "cpu".
        one_host: whether all ranks are on this host.

    Raises:
        BackendError: the backend is not in this torch, needs a device that is not here, or does not take `device_type`.
    """
    native = "shm" if device_type == "cpu" and one_host else NATIVE_BACKEND[device_type]
    name = (asked or native).lower()
    if not _is_available(name):
        needs = _device_of(name)
        reason = (
            f"it needs a device of type {needs!r}, and this machine shows none"
            if needs not in (None, "cpu") and dist.is_backend_available(name)
            else f"this torch was built without it, or no imported package registered it{_bringer(name)}"
        )
        raise BackendError(
            f"ddp_backend={name!r} cannot be used here: {reason}. Backends that are here: "
            f"{', '.join(available_backends())}. Leave ddp_backend out to get {native!r}, the one made "
            f"for {device_type!r}."
        )
    needs = _device_of(name)
    if needs is not None and name != "gloo" and device_type != needs:
        raise BackendError(
            f"ddp_backend={name!r} moves {needs} tensors, but this rank trains on {device_type!r}. "
            f"Write ddp_backend={native!r}, or leave it out."
        )
    return name


def _device_of(backend: str) -> str | None:
    return "cpu" if backend == "shm" else next((device for device, name in NATIVE_BACKEND.items() if name == backend), None)


def _bringer(backend: str) -> str:
    """The package that registers `backend`, in brackets, where that is not torch."""
    package = next((kind.package for kind in KINDS if kind.backend == backend and kind.package != "torch"), None)
    return f" (it comes with {package})" if package else ""


def _is_available(backend: str) -> bool:
    device = _device_of(backend)
    if device not in (None, "cpu"):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type != device:
            return False
    return dist.is_available() and dist.is_backend_available(backend)


def _initialize(environment: WorkerEnvironment, backend: str, device: torch.device, timeout: timedelta) -> None:
    if not 0 < environment.master_port < 1 << 16:
        raise LaunchVariablesError(
            f"MASTER_PORT={environment.master_port} is no port that rank {environment.rank} could join at: expected 1 to "
            f"65535. Launchers other than `allstep launch` pass 0 on as it is: give them a free port, or leave it to them."
        )
    if environment.local_world_size == environment.world_size and "lo" in (name for _, name in socket.if_nameindex()):
        # gloo asks the name server for this host's address otherwise, which hangs or fails on machines without one
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # objects and decisions go over the CPU, so that they never wait for a device
    names = f"cpu:gloo,{device.type}:{backend}" if device.type != "cpu" and backend != "mpi" else backend
    try:
        # Other launchers may serve the store themselves, and tell torch so.
        own = environment.launcher == "allstep"
        address, port = environment.master_addr, environment.master_port
        rank, size = environment.rank, environment.world_size
        dist.init_process_group(
            names,
            init_method=None if own else f"tcp://{_bracketed(address)}:{port}",
            store=open_store(address, port, rank=rank, size=size, timeout=timeout) if own else None,
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise CollectiveError(
            f"Rank {environment.rank} of {environment.world_size} could not join the others at "
            f"{environment.master_addr}:{environment.master_port} within {timeout.total_seconds():g} s "
            f"(backend {backend!r}): {error}"
        ) from error
    atexit.register(leave)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
