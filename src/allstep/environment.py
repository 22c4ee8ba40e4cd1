"""Launcher variables in, `WorkerEnvironment` out: who this process is, according to whoever started it.

allstep launch, torchrun and accelerate speak the same words, RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
and MASTER_PORT. None of them set means that nobody launched anything: a world of one.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from allstep.errors import LaunchVariablesError

__all__ = ["WorkerEnvironment"]

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
    """Who started this process: "none", "allstep", "torchrun", "accelerate", or "variables" for anything else."""
    use_cpu: bool = False
    """True where the launcher was told to keep off the accelerators (`accelerate launch --cpu`)."""

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process, be it alone."""
        return self.launcher != "none"

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> "WorkerEnvironment":
        """Read who this process is from `variables`, usually `os.environ`.

        Raises:
            LaunchVariablesError: some of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set and others missing, one of
                them is no number, or a rank lies outside its world.
        """
        use_cpu = variables.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
        if not any(variables.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            return cls(use_cpu=use_cpu)  # MASTER_ADDR alone is left over in many shells and says nothing
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
        local_rank = _number("LOCAL_RANK", variables, default=rank)
        local_world_size = _number("LOCAL_WORLD_SIZE", variables, default=world_size)
        if not 0 <= rank < world_size:
            raise LaunchVariablesError(
                f"RANK={rank} lies outside WORLD_SIZE={world_size}: ranks go from 0 to {world_size - 1}."
            )
        if not 0 <= local_rank < local_world_size <= world_size:
            raise LaunchVariablesError(
                f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world_size} and WORLD_SIZE={world_size} contradict one "
                f"another: expected 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE."
            )
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            master_addr=variables.get("MASTER_ADDR", ""),
            master_port=_number("MASTER_PORT", variables, default=0),
            launcher=_launcher(variables),
            use_cpu=use_cpu,
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
    if variables.get("ALLSTEP_RUN_ID"):
        return "allstep"
    if variables.get("ACCELERATE_MIXED_PRECISION"):
        return "accelerate"
    return "torchrun" if variables.get("TORCHELASTIC_RUN_ID") else "variables"


def _number(name: str, variables: Mapping[str, str], default: int | None = None) -> int:
    text = variables.get(name) or ("" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise LaunchVariablesError(f"{name}={text!r} is not a whole number; launchers set it to one.") from None


def _shown(names: list[str], variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={variables[name]}" for name in names)
