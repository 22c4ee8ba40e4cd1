"""Launcher variables in, `WorkerEnvironment` out: who this process is, according to whoever started it.

allstep launch, torchrun, accelerate and Kubeflow speak the same words, RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. Where both RANK and WORLD_SIZE are set they decide; else a SLURM step does, else MPI (the
package `launchers` knows their words). None of them means that nobody launched anything: a world of one.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from allstep.errors import LaunchVariablesError
from allstep.launchers.ancestors import pid_of_ancestor
from allstep.launchers.found import Found
from allstep.launchers.found import whole_number as _number
from allstep.launchers.mpi import mpi_numbers, read_mpi
from allstep.launchers.slurm import read_slurm

__all__ = ["WorkerEnvironment", "started_by_scheduler"]

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a process of a larger world cannot do without."""


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """One process of a job, as its launcher described it."""

    rank: int = 0
    """Number of this process in the job, 0 to world_size - 1."""
    world_size: int = 1
    """Number of processes of the job, on all hosts."""
    local_rank: int = 0
    """Number of this process on its host; chooses the device."""
    local_world_size: int = 1
    """Number of processes of the job on this host; divides its cores."""
    master_addr: str = ""
    """Host where rank 0 listens for the others; empty in a world that nobody launched."""
    master_port: int = 0
    """Port where rank 0 listens; 0 in a world that nobody launched."""
    launcher: str = "none"
    """Who started this process: "none", "allstep", "torchrun", "accelerate", "kubeflow", "slurm", "openmpi", "mpich",
    "intel mpi", "mvapich2", or "variables" for anything else that sets RANK and WORLD_SIZE."""
    use_cpu: bool = False
    """True where the launcher was told to keep off the accelerators (`accelerate launch --cpu`)."""

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process, be it alone."""
        return self.launcher != "none"

    @classmethod
    def from_variables(
        cls, variables: Mapping[str, str], ancestor: Callable[[str], int | None] = pid_of_ancestor
    ) -> "WorkerEnvironment":
        """Read who this process is from `variables`, usually `os.environ`.

        Args:
            ancestor: process id of the process above this one that runs a program; used for MPICH's port only.

        Raises:
            LaunchVariablesError: some of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set and others missing, one of
                them is no number, a rank lies outside its world, they contradict those of SLURM or MPI, or these leave open
                where rank 0 listens.
        """
        use_cpu = variables.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
        present = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if variables.get(name)]
        launcher = _launcher(variables)
        # A launcher below SLURM or MPI has numbers of its own; what it was started by need not even be readable.
        found = started_by_scheduler(variables, ancestor) if launcher in ("variables", "none") else None
        if found is not None:
            _check_agreement(present, variables, found)
            if not {"RANK", "WORLD_SIZE"} <= {*present}:
                return cls._from_found(found, variables, use_cpu)
        if not present:
            return cls(use_cpu=use_cpu)  # MASTER_ADDR alone is left over in many shells and says nothing
        return cls._from_words(variables, launcher, use_cpu)

    @classmethod
    def _from_words(cls, variables: Mapping[str, str], launcher: str, use_cpu: bool) -> "WorkerEnvironment":
        """What RANK, WORLD_SIZE and their like say."""
        alone = variables.get("WORLD_SIZE") == "1"  # a world of one meets nobody
        missing = [] if alone else [name for name in NEEDED if not variables.get(name)]
        if missing:
            present = [name for name in (*NEEDED, "LOCAL_RANK") if variables.get(name)]
            raise LaunchVariablesError(
                f"The launcher's variables are half set: {_shown(present, variables)}, but {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing. Start the script with `allstep launch --num_processes N "
                f"SCRIPT` or torchrun, which set all of them, or unset {', '.join(present)} to train in one process."
            )
        rank, world_size = _number("RANK", variables, default=0 if alone else None), _number("WORLD_SIZE", variables)
        in_pod = launcher == "kubeflow"
        if in_pod and variables.get("PET_NPROC_PER_NODE", "1") not in ("", "0", "1", "auto"):
            raise LaunchVariablesError(
                f"PET_NPROC_PER_NODE={variables['PET_NPROC_PER_NODE']} asks for several processes in each pod, and this is "
                "the only one. Start the script in the pod with `allstep launch SCRIPT` or `torchrun SCRIPT`; both read the "
                "PET_ variables. Or set nprocPerNode: 1 in the job."
            )
        local_rank = _number("LOCAL_RANK", variables, default=0 if in_pod else rank)
        local_world_size = _number("LOCAL_WORLD_SIZE", variables, default=1 if in_pod else world_size)
        return _checked(
            cls(
                rank=rank,
                world_size=world_size,
                local_rank=local_rank,
                local_world_size=local_world_size,
                master_addr=variables.get("MASTER_ADDR", ""),
                master_port=_number("MASTER_PORT", variables, default=0),
                launcher=launcher,
                use_cpu=use_cpu,
            )
        )

    @classmethod
    def _from_found(cls, found: Found, variables: Mapping[str, str], use_cpu: bool) -> "WorkerEnvironment":
        """What SLURM or MPI says; MASTER_ADDR and MASTER_PORT count where they are set."""
        address = variables.get("MASTER_ADDR") or found.master_addr
        port = _number("MASTER_PORT", variables, default=found.master_port)
        missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value]
        if missing and found.world_size > 1:
            raise LaunchVariablesError(
                f"{_shown([*found.said], found.said)}: {found.launcher} started {found.world_size} processes, "
                f"{found.local_world_size} of them on this host, but does not tell where rank 0 listens: "
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. To set it, {found.remedy}."
            )
        return _checked(
            cls(
                rank=found.rank,
                world_size=found.world_size,
                local_rank=found.local_rank,
                local_world_size=found.local_world_size,
                master_addr=address,
                master_port=port,
                launcher=found.launcher,
                use_cpu=use_cpu,
            )
        )

    def variables(self) -> dict[str, str]:
        """The variables that make a process read this same environment; what a launcher sets."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    def to_json(self) -> str:
        """One line of JSON; `WorkerEnvironment(**json.loads(line))` gives the same object."""
        return json.dumps(asdict(self))


def _launcher(variables: Mapping[str, str]) -> str:
    """Who set RANK and WORLD_SIZE; "none" where they are not set."""
    if not any(variables.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return "none"
    if variables.get("ALLSTEP_RUN_ID"):
        return "allstep"
    if variables.get("TORCHELASTIC_RUN_ID"):
        return "accelerate" if variables.get("ACCELERATE_MIXED_PRECISION") else "torchrun"
    if variables.get("ACCELERATE_MIXED_PRECISION"):
        return "accelerate"
    return "kubeflow" if variables.get("PET_NNODES") else "variables"


def started_by_scheduler(variables: Mapping[str, str], ancestor: Callable[[str], int | None] = pid_of_ancestor) -> Found | None:
    """What SLURM or MPI says of this process. None where neither started it.

    Raises:
        LaunchVariablesError: some of their variables are missing, or are no numbers.
    """
    step = read_slurm(variables)
    # mpirun starts its daemons as a step of their own, and the ranks below them inherit the variables of that step; srun
    # itself can speak PMI, and then says the same twice
    if step is None or mpi_numbers(variables) not in (None, (step.rank, step.world_size)):
        return read_mpi(variables, ancestor)
    return step


def _check_agreement(present: list[str], variables: Mapping[str, str], found: Found) -> None:
    """Refuse RANK and WORLD_SIZE that cannot be meant for the processes that SLURM or MPI started.

    More ranks than processes are fine: each process may start several.
    """
    rank = _number("RANK", variables, default=found.rank)
    world_size = _number("WORLD_SIZE", variables, default=found.world_size)
    if {*present} >= {"RANK", "WORLD_SIZE"} and world_size > found.world_size:
        return
    if world_size == found.world_size and rank == found.rank:
        return
    own = [name for name in ("RANK", "WORLD_SIZE") if variables.get(name)]
    theirs = [*found.said]
    raise LaunchVariablesError(
        f"Two launchers contradict one another: {_shown(own, variables)}, but {found.launcher} says "
        f"{_shown(theirs, found.said)}. Unset {' and '.join(own)} to believe {found.launcher}, or unset {theirs[0]} and "
        f"{theirs[1]} where each process is to do as {' and '.join(own)} {'says' if len(own) == 1 else 'say'}."
    )


def _checked(environment: WorkerEnvironment) -> WorkerEnvironment:
    """`environment`, if its numbers fit one another."""
    rank, world_size = environment.rank, environment.world_size
    local_rank, local_world_size = environment.local_rank, environment.local_world_size
    if not 0 <= rank < world_size:
        raise LaunchVariablesError(f"RANK={rank} lies outside WORLD_SIZE={world_size}: ranks go from 0 to {world_size - 1}.")
    if not 0 <= local_rank < local_world_size <= world_size:
        raise LaunchVariablesError(
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world_size} and WORLD_SIZE={world_size} contradict one "
            f"another: expected 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE."
        )
    return environment


def _shown(names: list[str], variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={variables[name]}" for name in names)
