"""The variables of `mpirun` and its like: Open MPI, MVAPICH2, Intel MPI and MPICH. Nothing of MPI itself is used.

None of them says where rank 0 is. On one host that is known anyway; on several it must be told, by MASTER_ADDR.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from allstep.errors import LaunchVariablesError
from allstep.launchers.found import Found, port_of, whole_number

__all__ = ["PROXY", "mpi_numbers", "read_mpi"]

PROXY = "hydra_pmi_proxy"
"""Program that starts the ranks of one host for MPICH and Intel MPI. MPICH leaves no variable that names the job."""


@dataclass(frozen=True, kw_only=True)
class _Words:
    """How one MPI says who a process is; of several names, the first that is set counts."""

    launcher: str
    signs: tuple[str, ...]
    """Variables that only this MPI sets."""
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    job: tuple[str, ...]
    """Variables with the same value on all ranks of a job, and another in every job."""
    export: str
    """How its starter is told to set a variable on all ranks."""


_PMI = {
    "rank": "PMI_RANK",
    "world_size": "PMI_SIZE",
    "local_rank": ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    "local_world_size": ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
}

_ALL = (
    _Words(
        launcher="openmpi",
        signs=("OMPI_COMM_WORLD_SIZE",),
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        export="mpirun -x MASTER_ADDR={addr} -x MASTER_PORT=29500",
    ),
    _Words(
        launcher="mvapich2",
        signs=("MV2_COMM_WORLD_SIZE",),
        rank="MV2_COMM_WORLD_RANK",
        world_size="MV2_COMM_WORLD_SIZE",
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        job=("MPIRUN_ID",),
        export="mpirun_rsh ... MASTER_ADDR={addr} MASTER_PORT=29500",
    ),
    _Words(
        launcher="intel mpi",
        signs=("I_MPI_HYDRA_UUID", "I_MPI_MPIRUN"),
        job=("I_MPI_HYDRA_UUID",),
        export="mpirun -genv MASTER_ADDR {addr} -genv MASTER_PORT 29500",
        **_PMI,  # type: ignore[arg-type]
    ),
    _Words(
        launcher="mpich",
        signs=("PMI_SIZE",),
        job=(),
        export="mpirun -genv MASTER_ADDR {addr} -genv MASTER_PORT 29500",
        **_PMI,  # type: ignore[arg-type]
    ),
)


def mpi_numbers(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and number of ranks of this process in an MPI job; None where no MPI started it.

    Raises:
        LaunchVariablesError: they are no numbers.
    """
    words = _words(variables)
    return (whole_number(words.rank, variables), whole_number(words.world_size, variables)) if words is not None else None


def read_mpi(variables: Mapping[str, str], ancestor: Callable[[str], int | None]) -> Found | None:
    """This process as a rank of an MPI job; None where no MPI started it.

    Args:
        ancestor: process id of the nearest process above this one that runs the named program; None where there is none.

    Raises:
        LaunchVariablesError: some of the variables are missing, or are no numbers.
    """
    words = _words(variables)
    return _read(words, variables, ancestor) if words is not None else None


def _words(variables: Mapping[str, str]) -> _Words | None:
    """Those of the MPI that started this process."""
    for words in _ALL:
        if any(variables.get(sign) for sign in words.signs) and variables.get(words.world_size):
            return words
    return None


def _read(words: _Words, variables: Mapping[str, str], ancestor: Callable[[str], int | None]) -> Found:
    size = whole_number(words.world_size, variables)
    local_rank, local_size = _local(words, variables, size)
    one_host = local_size == size
    return Found(
        launcher=words.launcher,
        rank=whole_number(words.rank, variables),
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        said={name: variables.get(name, "") for name in (words.rank, words.world_size)},
        master_addr="127.0.0.1" if one_host else "",
        master_port=_port(words, variables, ancestor, one_host),
        remedy=f"write `{words.export.format(addr='127.0.0.1' if one_host else 'HOST_OF_RANK_0')} ...`",
    )


def _local(words: _Words, variables: Mapping[str, str], size: int) -> tuple[int, int]:
    rank, count = (
        next((name for name in names if variables.get(name)), "") for names in (words.local_rank, words.local_world_size)
    )
    if size > 1 and not (rank and count):
        raise LaunchVariablesError(
            f"{words.world_size}={size} says that {words.launcher} started {size} processes, but {words.local_rank[0]} and "
            f"{words.local_world_size[0]}, which tell those of this host, are missing. Set RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself, or start the script with `allstep launch`."
        )
    return whole_number(rank, variables, default=0), whole_number(count, variables, default=1)


def _port(words: _Words, variables: Mapping[str, str], ancestor: Callable[[str], int | None], one_host: bool) -> int:
    """The port that follows from the job; 0 where nothing names it on all ranks alike."""
    job = next((variables[name] for name in words.job if variables.get(name)), None)
    if job is not None:
        return port_of(job)
    proxy = ancestor(PROXY) if one_host and words.rank == "PMI_RANK" else None
    return port_of(proxy) if proxy is not None else 0
