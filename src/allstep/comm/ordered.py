"""An all-reduce that adds in a tree by rank on any backend: ((0 + 1) + (2 + 3)) + …, whatever the backend's own order is.

Every rank sends each other rank its part of the tensor, adds the parts that it got in that order, and gives the sum to all.
That moves as many bytes as a ring does.
"""

from typing import Any

import torch
import torch.distributed as dist

from allstep.comm.shm.reduction import combine

__all__ = ["OrderedSum"]


class OrderedSum:
    """One all-reduce of a tensor, in two collectives: `go_on` starts the second one. All ranks call both at the same points.

    Args:
        group: the ranks; more than one.
        tensor: contiguous, of one dimension; holds the sum after `wait`.
    """

    def __init__(self, group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
        self._group, self._tensor, size = group, tensor, group.size()
        self._chunk = -(-tensor.numel() // size)
        whole = tensor.numel() == self._chunk * size
        self._sent = tensor if whole else torch.cat([tensor, tensor.new_zeros(self._chunk * size - tensor.numel())])
        self._parts = torch.empty_like(self._sent)
        self._work: Any = group.alltoall_base(self._parts, self._sent, [], [])
        self._has_gone_on = False

    def go_on(self) -> None:
        """Add this rank's part of all tensors, and start to give it to all."""
        if self._has_gone_on:
            return
        self._has_gone_on = True
        self._work.wait()
        parts = list(self._parts.split(self._chunk)) if self._chunk else []
        if parts:
            combine(parts, dist.ReduceOp.SUM, parts[0], in_place=True)
        own = self._parts[: self._chunk].clone()
        self._work = self._group._allgather_base(self._sent, own)

    def wait(self) -> None:
        """Return when the tensor holds the sum."""
        self.go_on()
        self._work.wait()
        if self._sent is not self._tensor:
            self._tensor.copy_(self._sent[: self._tensor.numel()])
