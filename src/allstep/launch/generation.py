"""One start of all ranks of a job: which are on which host, and where they meet. The next start is another generation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from allstep.environment import WorkerEnvironment

__all__ = ["Generation"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What all launchers of a job agree on before their ranks start."""

    number: int
    """0, and one more after each restart."""
    run_id: str
    """Name of the job, without the generation."""
    counts: tuple[int, ...]
    """Ranks of each host."""
    hosts: tuple[str, ...]
    """Name of each host."""
    machine: int
    """Number of this host."""
    master_addr: str
    """Where rank 0 listens for the others."""
    master_port: int
    max_restarts: int
    """How many generations there may be after the first."""

    def told(self) -> dict[str, Any]:
        """What another host needs to know of it, for `of`."""
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any], *, machine: int, master_addr: str) -> "Generation":
        """What `told` gave on machine 0, for another `machine`, which reaches machine 0 by its own way."""
        lists = {name: tuple(fields[name]) for name in ("counts", "hosts")}
        return cls(**{**fields, **lists, "machine": machine, "master_addr": master_addr})

    @property
    def world_size(self) -> int:
        return sum(self.counts)

    @property
    def name(self) -> str:
        """ALLSTEP_RUN_ID of the ranks: those of two generations never take one another for their own."""
        return self.run_id if self.number == 0 else f"{self.run_id}.{self.number}"

    def ranks(self, machine: int) -> range:
        """The ranks of a host."""
        first = sum(self.counts[:machine])
        return range(first, first + self.counts[machine])

    @property
    def here(self) -> range:
        """The ranks of this host."""
        return self.ranks(self.machine)

    def worker(self, rank: int) -> WorkerEnvironment:
        """Who one rank of this host is."""
        return WorkerEnvironment(
            rank=rank,
            world_size=self.world_size,
            local_rank=rank - self.here.start,
            local_world_size=len(self.here),
            master_addr=self.master_addr,
            master_port=self.master_port,
        )
