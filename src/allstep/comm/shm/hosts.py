"""Ranks of several hosts, several on each: what those of one host share goes over memory, the rest over gloo.

A tensor is summed inside each host first, a slice by each of its ranks. Then the ranks that hold the same slice sum it over
hosts, and at last the slices are gathered inside each host. So each byte crosses between two hosts as often as with one rank
on each, by as many connections as there are ranks.

Between starting and waiting gloo's threads work on the slices; the two steps inside a host have lines of their own, so that
they may follow one another in any order.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from allstep.comm.shm.calls import pack
from allstep.comm.shm.peers import Peers
from allstep.comm.shm.reduction import cuts, multiply
from allstep.comm.shm.staged import Staged
from allstep.comm.shm.tensors import Flat, as_bytes

__all__ = ["AcrossHosts", "ranks_of_hosts"]


def ranks_of_hosts(keys: Sequence[str]) -> list[list[int]]:
    """The ranks of each host; empty where hosts have different numbers of ranks, or one each.

    Args:
        keys: by rank, equal for ranks of one host.
    """
    hosts: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        hosts.setdefault(key, []).append(rank)
    counts = {len(ranks) for ranks in hosts.values()}
    return list(hosts.values()) if len(counts) == 1 and counts != {1} else []


class AcrossHosts:
    """All-reduces over the ranks of several hosts.

    Args:
        first: the ranks of this host, for the step before gloo.
        last: the same ranks, for the step after it.
        across: gloo among the ranks of all hosts that have the same number on theirs.
        size: of all ranks.
    """

    def __init__(self, first: Peers, last: Peers, across: Any, size: int) -> None:
        self.first, self.last = first, last
        self._staged_first, self._staged_last = Staged(first), Staged(last)
        self._across, self._size = across, size

    def start(self, tensor: torch.Tensor, op: Any) -> Callable[[], None]:
        """Sum inside the host, and start to sum over hosts; what it returns does the rest."""
        whole = Flat(tensor)
        flat = whole.__enter__()
        bounds = cuts(flat.numel(), flat.element_size(), self.first.size)
        parts = [flat[low:high] for low, high in pairwise(bounds)]
        longest = max(part.numel() for part in parts)
        mine = torch.empty_like(parts[self.first.rank])
        summed = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        number, call = self._come(self.first, flat, summed)
        self._staged_first.scatter(mine, parts, summed, None, number, call, longest)
        self.first.done(number)
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(summed)
        work = self._across.allreduce([mine], options) if mine.numel() else None

        def finish() -> None:
            if work is not None:
                work.wait()
            if op == dist.ReduceOp.AVG:
                multiply(mine, 1.0 / self._size)
            number, call = self._come(self.last, flat, summed)
            self._staged_last.gather(
                [as_bytes(part) for part in parts], as_bytes(mine), number, call, longest * flat.element_size()
            )
            self.last.done(number)
            whole.__exit__(None)

        return finish

    def _come(self, peers: Peers, flat: torch.Tensor, op: Any) -> tuple[int, int]:
        call = pack("all_reduce", flat.dtype, flat.numel(), op)
        number = peers.post(call)
        peers.meet(number, call)
        return number, call

    def leave(self) -> None:
        """Let go of the memory of both steps."""
        self.first.leave()
        self.last.leave()
