"""The variables of a SLURM step: what `srun` tells each of its tasks.

Only a step counts. The shell of `salloc`, a batch script before its `srun`, and a terminal made by `srun --pty` also have
SLURM variables, and are one process each.
"""

import itertools
import re
from collections.abc import Iterator, Mapping

from allstep.errors import LaunchVariablesError
from allstep.launchers.found import Found, port_of, whole_number

__all__ = ["expand_counts", "expand_hosts", "read_slurm"]

_STEPS_APART = 1009
"""Two steps of one job have ports that lie apart, and apart from those of the jobs next to it."""


def read_slurm(variables: Mapping[str, str]) -> Found | None:
    """This process as a task of a SLURM step; None outside one.

    Raises:
        LaunchVariablesError: variables of the step are missing, or cannot be read.
    """
    if not (variables.get("SLURM_STEP_ID") and variables.get("SLURM_PROCID")) or variables.get("SLURM_PTY_PORT"):
        return None
    size_name = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if variables.get(name)), None)
    if size_name is None:
        raise LaunchVariablesError("This is a SLURM step, as SLURM_STEP_ID says, but SLURM_NTASKS is missing.")
    rank, size = whole_number("SLURM_PROCID", variables), whole_number(size_name, variables)
    hosts = expand_hosts(_first(variables, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    nodes = whole_number("SLURM_STEP_NUM_NODES", variables, default=len(hosts) or 1)
    node = whole_number("SLURM_NODEID", variables, default=0)
    return Found(
        launcher="slurm",
        rank=rank,
        world_size=size,
        local_rank=whole_number("SLURM_LOCALID", variables),
        local_world_size=_tasks_of(node, nodes, size, variables),
        said={"SLURM_PROCID": str(rank), size_name: str(size)},
        master_addr="127.0.0.1" if nodes == 1 else hosts[0] if hosts else "",
        master_port=_port(variables),
        remedy="export MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500 before srun, which hands them on",
    )


def expand_hosts(listed: str) -> list[str]:
    """The names in a list as SLURM writes it: "gpu[01-02,7],login" is gpu01, gpu02, gpu7, login."""
    parts = re.findall(r"(?:[^,\[\]]+|\[[^\]]*\])+", listed)
    return [name for part in parts for name in _expanded(part)]


def expand_counts(listed: str) -> list[int]:
    """The numbers in a list of tasks per node as SLURM writes it: "2(x3),1" is 2, 2, 2, 1.

    Raises:
        LaunchVariablesError: it is no such list.
    """
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()) for part in listed.split(",")]
    counts = []
    for match in found:
        if match is None:
            raise LaunchVariablesError(f"{listed!r} is no list of tasks per node; SLURM writes one like '2(x3),1'.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expanded(part: str) -> Iterator[str]:
    """The names of one part of a list; it may have several brackets."""
    pieces = [
        list(_numbers(piece[1:-1])) if piece.startswith("[") else [piece] for piece in re.findall(r"\[[^\]]*\]|[^\[\]]+", part)
    ]
    return ("".join(chosen) for chosen in itertools.product(*pieces))


def _numbers(ranges: str) -> Iterator[str]:
    for item in ranges.split(","):
        low, dash, high = item.strip().partition("-")
        if dash and low.isdecimal() and high.isdecimal():
            yield from (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
        else:
            yield item.strip()


def _tasks_of(node: int, nodes: int, size: int, variables: Mapping[str, str]) -> int:
    """Tasks of the step on node number `node`."""
    if nodes == 1:
        return size
    listed = _first(variables, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = expand_counts(listed) if listed else []
    if not node < len(counts):
        raise LaunchVariablesError(
            f"This SLURM step has {nodes} nodes, but SLURM_STEP_TASKS_PER_NODE={listed!r} does not tell the tasks on node "
            f"SLURM_NODEID={node}. Start the script with srun, which sets both."
        )
    return counts[node]


def _port(variables: Mapping[str, str]) -> int:
    job = whole_number(
        next((name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if variables.get(name)), ""), variables, default=0
    )
    return port_of(job + _STEPS_APART * whole_number("SLURM_STEP_ID", variables))


def _first(variables: Mapping[str, str], *names: str) -> str:
    """The value of the first of these variables that is set; empty where none is."""
    return next((variables[name] for name in names if variables.get(name)), "")
