"""From settings to what is started: a `LaunchSpec`, or the command of torch's elastic agent. Pure."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from allstep.devices import DeviceKind
from allstep.errors import ArgumentsError
from allstep.launch.settings import DEFAULT, Value
from allstep.launch.spec import LaunchSpec, threads_per_rank
from allstep.launch.variables import LAUNCHER_PID, steady_memory

__all__ = [
    "Machine",
    "Program",
    "elastic_command",
    "elastic_variables",
    "is_elastic",
    "machines_of",
    "ranks_here",
    "spec_of",
    "variables_of",
]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this machine has for a launch."""

    gpus: int
    """Accelerators that ranks would see."""
    cores: int
    """Cores that this job may use."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What each rank runs."""

    script: str
    module: bool = False
    no_python: bool = False
    args: tuple[str, ...] = ()


Resolved = Mapping[str, Value]


def machines_of(resolved: Resolved) -> tuple[int, int]:
    """Fewest and most machines of the job; equal unless it is elastic.

    Raises:
        ArgumentsError: neither a number nor MIN:MAX.
    """
    said = resolved["num_machines"]
    low, _, high = str(said.value).partition(":")
    try:
        fewest, most = int(low), int(high or low)
    except ValueError:
        raise ArgumentsError(f"{_shown(said)}: expected a number of machines, or MIN:MAX.") from None
    if not 1 <= fewest <= most:
        raise ArgumentsError(f"{_shown(said)}: expected 1 or more, and MIN no larger than MAX.")
    if resolved["standalone"].value and most > 1:
        raise ArgumentsError(f"--standalone means one machine, but {_shown(said)}: leave one of them out.")
    return fewest, most


def is_elastic(resolved: Resolved) -> bool:
    """Whether machines find one another, and may come and go: torch's elastic agent does that."""
    fewest, most = machines_of(resolved)
    return most > fewest or (most > 1 and resolved["rdzv_backend"].value not in (None, "static"))


def variables_of(resolved: Resolved, kind: DeviceKind) -> dict[str, str]:
    """The variables that settings add to the environment of every rank.

    Args:
        kind: the devices of this machine.
    """
    own = {}
    gpu_ids = resolved["gpu_ids"].value
    if gpu_ids not in (None, "all"):
        own[kind.visible or "CUDA_VISIBLE_DEVICES"] = str(gpu_ids)
    if resolved["cpu"].value:
        own["ACCELERATE_USE_CPU"] = "true"
    if resolved["mixed_precision"].value is not None:
        own["ACCELERATE_MIXED_PRECISION"] = str(resolved["mixed_precision"].value)
    return own


def ranks_here(resolved: Resolved, machine: Machine) -> int:
    """Ranks to start on this machine.

    Raises:
        ArgumentsError: num_processes and nproc_per_node say different things, or ranks do not divide over machines.
    """
    total, each = resolved["num_processes"], resolved["nproc_per_node"]
    fewest, machines = machines_of(resolved)
    if total.level < each.level:
        each = Value(None, "", DEFAULT)
    elif each.level < total.level:
        total = Value(None, "", DEFAULT)
    here = None if each.value is None else _local_ranks(each, machine)
    if total.value is not None:
        count = int(total.value)
        if fewest != machines:
            raise ArgumentsError(
                f"{_shown(total)} counts the ranks of all machines, but their number may change: "
                f"{_shown(resolved['num_machines'])}. Write --nproc_per_node."
            )
        if here is not None and here * machines != count:
            raise ArgumentsError(
                f"{_shown(total)} counts the ranks of all machines and {_shown(each)} those of one, and on {machines} "
                f"machine{'s' if machines > 1 else ''} they say different things: leave one of them out."
            )
        if count >= 1 and count % machines:
            raise ArgumentsError(
                f"{_shown(total)} ranks do not divide over {machines} machines ({_shown(resolved['num_machines'])}): expected "
                f"a multiple of {machines}, as it counts the ranks of all machines. --nproc_per_node counts those of each."
            )
        return count // machines if count >= 1 else count  # the spec refuses what is below 1
    if here is not None:
        return here
    return max(1, 0 if resolved["cpu"].value else machine.gpus)


def spec_of(resolved: Resolved, program: Program, machine: Machine, kind: DeviceKind) -> LaunchSpec:
    """The launch that `resolved` describes, for this machine.

    Raises:
        ArgumentsError: something is missing, out of its range, or contradicts another setting.
    """
    machines, ranks = machines_of(resolved)[1], ranks_here(resolved, machine)
    address, port = _meeting(resolved) if machines > 1 else (None, int(resolved["main_process_port"].value or 0))
    if machines > 1 and resolved["machine_rank"].value is None:
        raise ArgumentsError(
            f"{_shown(resolved['num_machines'])}, but which of them this is was not said: write --machine_rank I, 0 on the "
            f"machine where rank 0 runs, to {machines - 1} on the last."
        )
    threads = resolved["num_cpu_threads_per_process"].value
    log_dir, run_id = resolved["log_dir"].value, resolved["run_id"].value
    return LaunchSpec(
        script=program.script,
        module=program.module,
        no_python=program.no_python,
        args=program.args,
        num_processes=ranks,
        num_cpu_threads_per_process=None if threads is None else int(threads),
        main_process_port=port,
        log_dir=None if log_dir is None else str(log_dir),
        grace_period=float(resolved["grace_period"].value or 0.0),
        num_machines=machines,
        machine_rank=int(resolved["machine_rank"].value or 0),
        main_process_ip=address,
        max_restarts=int(resolved["max_restarts"].value or 0),
        monitor_interval=float(resolved["monitor_interval"].value or 0.0),
        run_id=None if run_id is None else str(run_id),
        env=tuple(variables_of(resolved, kind).items()),
        tee=bool(resolved["tee"].value),
    )


def elastic_command(resolved: Resolved, program: Program, machine: Machine, python: str) -> list[str]:
    """The command of torch's elastic agent for the same job. Ranks run below our worker, which records their failures.

    Raises:
        ArgumentsError: the rendezvous or the name of the job is missing; or num_processes is given, which has no meaning.
    """
    fewest, most = machines_of(resolved)
    address, port = _meeting(resolved)
    missing = [name for name, value in (("run_id", resolved["run_id"].value), ("rdzv_endpoint", address)) if not value]
    if missing:
        lines = {
            "run_id": "--run_id NAME, the same on all machines and another for each job (torchrun's default would let a new "
            "job find the rendezvous of an old one)",
            "rdzv_endpoint": "--rdzv_endpoint HOST:PORT of one of the machines",
        }
        raise ArgumentsError(
            f"{_shown(resolved['num_machines'])} is for torch's elastic agent, which needs "
            f"{' and '.join(lines[name] for name in missing)}."
        )
    options = {
        "nnodes": f"{fewest}:{most}",
        "nproc_per_node": ranks_here(resolved, machine),
        "rdzv_backend": resolved["rdzv_backend"].value or "c10d",
        "rdzv_endpoint": f"{address}:{port}",
        "rdzv_id": resolved["run_id"].value,
        "rdzv_conf": resolved["rdzv_conf"].value,
        "max_restarts": resolved["max_restarts"].value,
        "monitor_interval": resolved["monitor_interval"].value,
        "log_dir": resolved["log_dir"].value,
        "tee": 3 if resolved["tee"].value else None,
    }
    how = ["-m"] if program.module else ["--no_python"] if program.no_python else []
    return [
        python,
        "-m",
        "torch.distributed.run",
        *(f"--{name}={value}" for name, value in options.items() if value is not None),
        *("-m", "allstep.launch.worker", *how),
        program.script,
        *program.args,
    ]


def elastic_variables(
    resolved: Resolved, machine: Machine, variables: Mapping[str, str], *, pid: int, glibc: tuple[int, int] | None
) -> dict[str, str]:
    """What torch's agent hands on to its ranks, so that they run as below this launcher.

    Args:
        variables: those of the user.
        pid: process id of the agent.
        glibc: see `steady_memory`.
    """
    asked = resolved["num_cpu_threads_per_process"].value
    threads = threads_per_rank(machine.cores, ranks_here(resolved, machine), variables, None if asked is None else int(asked))
    own = {LAUNCHER_PID: str(pid)}
    if threads is not None:
        own["OMP_NUM_THREADS"] = str(threads)
    if not machine.gpus:
        own["ACCELERATE_USE_CPU"] = variables.get("ACCELERATE_USE_CPU") or "true"
        own |= steady_memory(variables, glibc)
    return own


def _meeting(resolved: Resolved) -> tuple[str | None, int]:
    """Host and port where machines meet: main_process_ip and main_process_port, or rdzv_endpoint, which has both."""
    address, port, both = resolved["main_process_ip"], resolved["main_process_port"], resolved["rdzv_endpoint"]
    host: str | None = None if address.value is None else str(address.value)
    number = int(port.value or 0)
    if both.value is None or both.level > address.level:
        return host, number
    named, colon, numbered = str(both.value).rpartition(":")
    if not colon:
        named = numbered
    elif not numbered.isdecimal():
        raise ArgumentsError(f"{_shown(both)}: expected HOST:PORT.")
    if host is not None and address.level == both.level and host != named:
        raise ArgumentsError(f"{_shown(both)} and {_shown(address)} name two hosts: leave one of them out.")
    found = int(numbered) if colon else number
    if port.level == both.level and colon and number != found:
        raise ArgumentsError(f"{_shown(both)} and {_shown(port)} name two ports: leave one of them out.")
    return named.strip("[]"), found


def _local_ranks(each: Value, machine: Machine) -> int:
    """What a word for the ranks of one machine comes to."""
    word = str(each.value).lower()
    if word == "gpu" and machine.gpus == 0:
        raise ArgumentsError(f"{_shown(each)}, but this machine shows no GPU. Write a number, or cpu for one rank per core.")
    known = {"gpu": machine.gpus, "cpu": machine.cores, "auto": machine.gpus or machine.cores}
    if word in known:
        return known[word]
    try:
        return int(word)
    except ValueError:
        raise ArgumentsError(f"{_shown(each)}: expected a number, auto, cpu or gpu.") from None


def _shown(value: Value) -> str:
    """A value as the user wrote it: "--nnodes 2", "PET_NNODES=2", "num_machines: 2 in FILE"."""
    word, _, place = value.origin.partition(" in ")
    if place:
        return f"{word}: {value.value} in {os.path.basename(place)}"
    return f"{word} {value.value}" if word.startswith("--") else f"{word}={value.value}"
