"""The sum of a small tensor: everyone leaves a copy and combines all copies, at one wait.

This is the path on which Python's own cost counts, so it is written out and looks nothing up that could be kept.
"""

from typing import Any

import torch
import torch.distributed as dist

from allstep.comm.shm.calls import pack
from allstep.comm.shm.peers import CALLS, COPIED, DONE, POSTED, REMEMBERED, Peers
from allstep.comm.shm.reduction import COMBINE, combine
from allstep.comm.shm.staged import Staged

__all__ = ["SmallSum"]


class SmallSum:
    """All-reduces of tensors of one shape, dtype and operation, at most `SMALL` bytes each.

    Args:
        peers: the ranks.
        staged: what to do where some rank has left no copy: its tensor lies in shared memory, or it does not wait.
        like: a tensor of that shape and dtype, contiguous.
        op: how values are combined.
    """

    def __init__(self, peers: Peers, staged: Staged, like: torch.Tensor, op: Any) -> None:
        self._peers, self._staged, self._op = peers, staged, op
        self._call = pack("all_reduce", like.dtype, like.numel(), op)
        nbytes = like.numel() * like.element_size()
        self._copies = [[each[:nbytes].view(like.dtype).view(like.shape) for each in turn] for turn in peers.small]
        self._others = [cells for rank, cells in enumerate(peers.cells) if rank != peers.rank]
        self._pair = COMBINE[op] if peers.size == 2 and op != dist.ReduceOp.AVG else None

    def __call__(self, tensor: torch.Tensor) -> None:
        """Combine `tensor` over ranks, in place."""
        peers, own, others = self._peers, self._peers.own, self._others
        number = peers.posted + 1
        for cells in others:
            if cells[DONE] < number - 2:  # two places take turns: this one is free when the last but one is done
                peers.all_done(number - 2, self._call)
        copies = self._copies[number & 1]
        copies[peers.rank].copy_(tensor)
        peers.posted, at = number, CALLS + 2 * (number % REMEMBERED)
        own[at] = self._call
        own[at + 1] = COPIED
        peers.tell(POSTED, number)
        for cells in others:
            if cells[POSTED] < number:
                peers.watch.wait(POSTED, number, self._call)
        for cells in others:
            if cells[at] != self._call or cells[at + 1] != COPIED:
                peers.meet(number, self._call)
                self._staged.all_reduce(tensor.view(-1), self._op, number, self._call)
                break
        else:
            if self._pair is not None:
                self._pair(*copies, out=tensor)
            else:
                combine(copies, self._op, tensor)
        peers.tell(DONE, number)
