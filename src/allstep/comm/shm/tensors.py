"""Tensors of a program as the flat memory that collectives work on."""

import torch

__all__ = ["Flat", "as_bytes"]


class Flat:
    """`with Flat(tensor) as flat`: (numel,) its elements, outside of autograd; what is written there is in `tensor` afterwards.

    Args:
        tensor: of any strides.
        is_written: False for one that is only read.
    """

    def __init__(self, tensor: torch.Tensor, *, is_written: bool = True) -> None:
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._is_written = is_written

    def __enter__(self) -> torch.Tensor:
        self._flat = self._tensor.contiguous().view(-1)
        return self._flat

    def __exit__(self, error: object, *_: object) -> None:
        if error is None and self._is_written and not self._tensor.is_contiguous():
            self._tensor.copy_(self._flat.view(self._tensor.shape))


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """(numel x itemsize,) uint8: the memory of a contiguous tensor."""
    return flat.view(-1).view(torch.uint8)
