"""What to launch, and the numbers that follow from the machine: ranks, cores, threads. Nothing in here starts a process."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from allstep.devices import visible_devices
from allstep.errors import ArgumentsError

__all__ = ["LaunchSpec", "cores_available", "default_num_processes", "threads_per_rank", "visible_gpus"]

ROOT = ""
"""Where /proc, /sys and /dev are looked for; tests put a folder of their own here."""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One launch: which program, how many ranks, and what each of them is given.

    Raises:
        ArgumentsError: a number is out of its range, or `main_process_ip` is missing on several hosts. One message lists all
            problems.
    """

    script: str
    """Path of the script, or name of the module where `module` is true."""
    module: bool = False
    """Run `script` as `python -m` would."""
    no_python: bool = False
    """Run `script` as a program of its own, not by Python."""
    args: tuple[str, ...] = ()
    """Arguments of the script, handed on untouched."""
    num_processes: int = 1
    """Ranks to start on this host."""
    num_cpu_threads_per_process: int | None = None
    """OMP_NUM_THREADS of each rank. None: the user's OMP_NUM_THREADS, else the cores of this job divided by the ranks."""
    main_process_port: int = 0
    """Port on which rank 0 meets the others; 0 takes a free one. On several hosts the one on which the launchers meet; 0 takes
    29500."""
    log_dir: str | None = None
    """Folder for the output of the ranks other than 0, kept in any case. None: a private one, kept after a failure."""
    grace_period: float = 10.0
    """Seconds a rank has to end after SIGTERM before it is killed."""
    num_machines: int = 1
    """Hosts of the job. Each runs a launch of its own, with another `machine_rank`."""
    machine_rank: int = 0
    """Number of this host, 0 to num_machines - 1. Rank 0 runs on machine 0."""
    main_process_ip: str | None = None
    """Address of machine 0, by which the others reach it; needed on several hosts, and not used on one."""
    max_restarts: int = 0
    """How often all ranks are started again after a failure, before the job is given up. Machine 0's counts for all."""
    monitor_interval: float = 1.0
    """Seconds after which a sleeping launcher looks for what no signal tells: a rank may fail and then hang."""
    run_id: str | None = None
    """Name of the job; the launches of its hosts must agree on it. None: a random one, by machine 0."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables added to the environment of every rank."""
    tee: bool = False
    """Show the output of ranks other than 0 on this terminal too, each line with its rank in front."""

    def __post_init__(self) -> None:
        problems = []
        if self.module and self.no_python:
            problems.append("module and no_python are both said: a module is run by Python")
        if self.num_processes < 1:
            problems.append(f"num_processes={self.num_processes}: expected 1 or more, one process per rank")
        if self.num_cpu_threads_per_process is not None and self.num_cpu_threads_per_process < 1:
            problems.append(f"num_cpu_threads_per_process={self.num_cpu_threads_per_process}: expected 1 or more")
        if not 0 <= self.main_process_port <= 65535:
            problems.append(f"main_process_port={self.main_process_port}: expected 1 to 65535, or 0 for a free one")
        if not (self.grace_period >= 0 and math.isfinite(self.grace_period)):
            problems.append(f"grace_period={self.grace_period}: expected a number of seconds, 0 or more")
        if self.num_machines < 1:
            problems.append(f"num_machines={self.num_machines}: expected 1 or more")
        elif not 0 <= self.machine_rank < self.num_machines:
            expected = f"0 to {self.num_machines - 1}" if self.num_machines > 1 else "0, as there is one machine"
            problems.append(f"machine_rank={self.machine_rank}: expected {expected}")
        if self.num_machines > 1 and not self.main_process_ip:
            problems.append("main_process_ip is missing: on several hosts all need the address of machine 0")
        if self.max_restarts < 0:
            problems.append(f"max_restarts={self.max_restarts}: expected 0 or more")
        if not (self.monitor_interval > 0 and math.isfinite(self.monitor_interval)):
            problems.append(f"monitor_interval={self.monitor_interval}: expected a number of seconds above 0")
        if problems:
            raise ArgumentsError("This cannot be launched: " + "; ".join(problems) + ".")

    def command(self, python: str) -> list[str]:
        """The command line of one rank, run by the interpreter `python`."""
        how = ["-m"] if self.module else ["--no_python"] if self.no_python else []
        return [python, "-m", "allstep.launch.worker", *how, self.script, *self.args]

    def to_json(self) -> str:
        """One line of JSON, for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "LaunchSpec":
        """The same object that wrote `text`."""
        fields = json.loads(text)
        env = tuple((name, value) for name, value in fields["env"])
        return cls(**{**fields, "args": tuple(fields["args"]), "env": env})


def threads_per_rank(cores: int, local_ranks: int, variables: Mapping[str, str], asked: int | None = None) -> int | None:
    """OMP_NUM_THREADS for each rank: `asked`, else an equal part of the cores. None: leave the user's value as it is."""
    if asked is not None:
        return asked
    if variables.get("OMP_NUM_THREADS"):
        return None
    return max(1, cores // local_ranks)


def default_num_processes(gpus: int) -> int:
    """One rank per visible GPU; one where there is none."""
    return max(1, gpus)


def visible_gpus(variables: Mapping[str, str], root: str = ROOT) -> int:
    """Accelerators that a rank would see, see `visible_devices`."""
    return visible_devices(variables, root)


def cores_available(affinity: int | None = None, root: str = ROOT) -> int:
    """Cores that this job may really use: its affinity mask, cut by the CPU quota of its control group.

    Args:
        affinity: cores in the affinity mask; None asks the kernel.
    """
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _quota(folder)) is not None]
    # Rounded down: a thread more than the quota allows makes the kernel pause all of them in turn.
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


def _cgroup_folders(root: str) -> Iterator[str]:
    """The folders, of version 1 or 2, whose quota holds for this process: its own control group and those above it."""
    try:
        lines = _text(f"{root}/proc/self/cgroup").splitlines()
    except OSError:
        return
    mounts = f"{root}/sys/fs/cgroup"
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            bases = [mounts, f"{mounts}/unified"]
        elif "cpu" in controllers.split(","):
            bases = [f"{mounts}/{controllers}", f"{mounts}/cpu"]
        else:
            continue
        # Inside a container the path may be the host's and not exist here; then the root of the mount is our group.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            for length in range(len(parts), -1, -1):
                yield os.path.join(base, *parts[:length])


def _quota(folder: str) -> float | None:
    """Cores that one control group allows; None where it sets no limit."""
    try:
        if os.path.exists(f"{folder}/cpu.max"):
            quota, period = _text(f"{folder}/cpu.max").split()
        else:
            quota, period = (_text(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        return int(quota) / int(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
