"""Communication hooks: torch's own functions and users', which decide how a bucket's gradients are averaged.

A hook is `f(state, bucket) -> Future[Tensor]`, called when a bucket is full; the future's tensor takes the place of the
bucket's gradients. `GradBucket` offers what torch's class of that name offers, so the functions of
`torch.distributed.algorithms.ddp_comm_hooks` run as they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

__all__ = ["CommHook", "GradBucket", "HookedTransfer", "builtin_hook"]

CommHook = Callable[[Any, "GradBucket"], "torch.futures.Future[torch.Tensor]"]


class GradBucket:
    """One full bucket, as a hook sees it. The gradients in it are this rank's own, not divided by anything."""

    def __init__(
        self,
        index: int,
        is_last: bool,
        flat: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._index, self._is_last, self._flat = index, is_last, flat
        self._gradients, self._parameters = list(gradients), list(parameters)

    def index(self) -> int:
        """Number of the bucket, in launch order."""
        return self._index

    def is_last(self) -> bool:
        """Whether this is the last bucket of a backward."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, flat: (elements,)."""
        return self._flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put `tensor`, of the same size, in the place of the flat gradients."""
        self._flat = tensor

    def gradients(self) -> list[torch.Tensor]:
        """The gradients one by one, as views of the flat ones, in the shapes of their parameters."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """The parameters to which the gradients belong."""
        return self._parameters


class HookedTransfer:
    """A bucket that a hook is averaging; to wait for it brings the result into flat storage.

    Args:
        future: what the hook returned.
        target: the flat gradients.

    Raises:
        TypeError: the hook returned something else.
    """

    def __init__(self, future: Any, target: torch.Tensor) -> None:
        if not isinstance(future, torch._C.Future):  # what `then` gives is of torch.futures.Future's base class
            raise TypeError(
                f"A communication hook has to return a torch.futures.Future of a tensor; this one returned "
                f"{type(future).__name__}. End it with `return work.get_future().then(...)`."
            )
        self._future, self._target = future, target

    def wait(self) -> None:
        """Wait for the hook's future and take its tensor over.

        Raises:
            RuntimeError: what the hook's own code raised, or a result of another size.
        """
        result = self._future.wait()
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]  # the future of a plain all_reduce holds a list
        if not isinstance(result, torch.Tensor) or result.numel() != self._target.numel():
            found = f"{tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise RuntimeError(
                f"A communication hook's future has to hold a tensor of {self._target.numel()} elements, as its bucket has; "
                f"this one holds {found}."
            )
        if result.data_ptr() != self._target.data_ptr():
            self._target.copy_(result.reshape(-1))


def builtin_hook(name: str) -> CommHook:
    """torch's own function for a `torch.distributed.BuiltinCommHookType`: "ALLREDUCE" or "FP16_COMPRESS"."""
    hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
    if name not in hooks:
        raise ValueError(f"There is no built-in communication hook {name!r}; there are {', '.join(hooks)}.")
    return hooks[name]
