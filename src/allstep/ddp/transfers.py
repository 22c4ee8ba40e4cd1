"""How one full bucket is averaged over ranks: by an all-reduce, in float32 where that is needed, or by a hook."""

from typing import Any

import torch

from allstep.comm.communicator import Communicator, Pending, PendingInOrder
from allstep.ddp.buffers import GradientStorage
from allstep.ddp.comm_hooks import CommHook, GradBucket, HookedTransfer
from allstep.ddp.layout import Bucket

__all__ = ["start_hooked_transfer", "start_ordered_transfer", "start_transfer"]

_HALF = (torch.float16, torch.bfloat16)


def start_transfer(communicator: Communicator, storage: GradientStorage, bucket: Bucket, divide_by: int) -> Pending:
    """Start to sum a bucket over ranks, with its riders; its gradients are divided by `divide_by`, where 0 by the backend."""
    gradients = storage.gradients[bucket.index]
    if gradients.dtype in _HALF and communicator.size > 2 and gradients.device.type == "cpu":
        return _WideTransfer(communicator, gradients, divide_by or communicator.size)
    if divide_by > 1:
        gradients.mul_(1.0 / divide_by)  # before the sum, so that it stays in the range of fp16
    return communicator.all_reduce(storage.buckets[bucket.index], average=not divide_by)


def start_ordered_transfer(
    communicator: Communicator, storage: GradientStorage, bucket: Bucket, divide_by: int
) -> PendingInOrder:
    """Start to sum a bucket over ranks in a tree by rank, whatever order the backend has; gradients are divided before."""
    if divide_by > 1:
        storage.gradients[bucket.index].mul_(1.0 / divide_by)
    return communicator.all_reduce_in_order(storage.buckets[bucket.index])


def start_hooked_transfer(
    hook: tuple[Any, CommHook], storage: GradientStorage, bucket: Bucket, is_last: bool, parameters: list[torch.nn.Parameter]
) -> Pending:
    """Let a communication hook (state, function) average a bucket's gradients; riders, which are none, it does not see."""
    state, function = hook
    flat = storage.gradients[bucket.index]
    seen = GradBucket(
        bucket.index,
        is_last,
        flat,
        [storage.views[index] for index in bucket.parameters],
        [parameters[index] for index in bucket.parameters],
    )
    return HookedTransfer(function(state, seen), flat)


class _WideTransfer:
    """Half-precision gradients that are summed as float32; to wait for it brings the sum back.

    With more than two ranks a sum in half precision is rounded on its way, which the mean of numbers that cancel does not
    survive (test_reports_dtypes.py).
    """

    def __init__(self, communicator: Communicator, target: torch.Tensor, divide_by: int) -> None:
        self._target, self._sum = target, target.float().mul_(1.0 / divide_by)
        self._pending = communicator.all_reduce(self._sum)

    def wait(self) -> None:
        """Wait, and round once."""
        self._pending.wait()
        self._target.copy_(self._sum)
