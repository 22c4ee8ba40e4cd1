"""Fair blocks on several ranks: idle cores before each, the slowest rank's time, and what other processes took meanwhile."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from allstep.cli.bench.blocks import Block, foreign_share
from allstep.cli.bench.cores import TICK, Patience, busy_seconds
from allstep.comm.communicator import communicator_for
from allstep.launch.spec import cores_available

__all__ = ["Referee", "note"]


class Referee:
    """Runs blocks on all ranks of the default group, which must be able to wait without using a core, as gloo's does.

    Args:
        patience: seconds in all that may be spent on waiting for idle cores.
    """

    def __init__(self, patience: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._ranks = communicator_for(None)
        self._patience = Patience(patience)
        self._cores = cores_available()
        self.elapsed = 0.0
        """Seconds that blocks took since `begin`, equal on all ranks."""

    def begin(self) -> None:
        """Start to count `elapsed` for the next comparison."""
        self.elapsed = 0.0

    def block(self, run: Callable[[], float]) -> Block:
        """Collective. One block: `run` gives this rank's seconds for one call or step. All ranks get the same answer."""
        if self.rank == 0:
            self._patience.wait()
        self._ranks.barrier()
        began, own, busy = time.perf_counter(), time.process_time(), busy_seconds()
        seconds = run()
        mine = (seconds, time.perf_counter() - began, time.process_time() - own, busy_seconds() - busy)
        each = self._ranks.all_gather_object(mine)
        wall = max(one[1] for one in each)
        self.elapsed += wall
        foreign = foreign_share(
            busy=max(one[3] for one in each),
            own=sum(one[2] for one in each),
            wall=wall,
            cores=self._cores,
            tick=TICK,
        )
        return Block(seconds=max(one[0] for one in each), foreign=foreign)

    def slowest(self, seconds: float) -> float:
        """Collective. The largest value of all ranks."""
        return float(max(self._ranks.all_gather_object(seconds)))

    def everyone(self, value: Any) -> list[Any]:
        """Collective. What each rank gave, by rank."""
        return self._ranks.all_gather_object(value)


def note(text: str) -> None:
    """Progress, from rank 0, to the terminal: standard output belongs to the result."""
    if dist.get_rank() == 0:
        print(f"  {text}", file=sys.stderr, flush=True)
