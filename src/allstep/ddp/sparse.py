"""Sparse gradients: of each, the rows that any rank has, averaged; they have no place in buckets.

Every rank fills its own part of a tensor that is zero elsewhere, and their sum brings all parts to all ranks: first how many
rows each one has, then their numbers, then their values.
"""

from collections.abc import Sequence

import torch
from torch import nn

from allstep.comm.communicator import Communicator

__all__ = ["average_sparse_gradients", "sparse_parameters"]


def sparse_parameters(module: nn.Module) -> set[int]:
    """The `id` of every parameter whose module says that its gradients are sparse."""
    layers = (layer for layer in module.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)))
    return {id(layer.weight) for layer in layers if layer.sparse}


def average_sparse_gradients(
    communicator: Communicator, parameters: Sequence[torch.Tensor], scale: float | torch.Tensor
) -> None:
    """Collective. Put `scale` x the sum over ranks into each `.grad`; a rank without a gradient counts as zeros.

    All ranks give the same parameters. A gradient that is dense on this rank, as that of a weight with a dense use beside the
    sparse one, stays dense here.
    """
    rows = [_rows(parameter) for parameter in parameters]
    if not rows:
        return
    device = parameters[0].device
    counts = torch.zeros(len(rows), communicator.size, dtype=torch.int64, device=device)
    counts[:, communicator.rank] = torch.tensor([len(indices) for indices, _ in rows], device=device)
    communicator.all_reduce(counts).wait()
    for parameter, (indices, values), of_ranks in zip(parameters, rows, counts.tolist(), strict=True):
        start, own = sum(of_ranks[: communicator.rank]), len(indices)
        everyone = values.new_zeros(sum(of_ranks), *parameter.shape[1:])
        numbers = indices.new_zeros(sum(of_ranks))
        everyone[start : start + own] = values if isinstance(scale, torch.Tensor) else values * scale
        numbers[start : start + own] = indices
        communicator.all_reduce(numbers).wait()
        communicator.all_reduce(everyone).wait()
        if isinstance(scale, torch.Tensor):
            everyone.mul_(scale)
        mean = torch.sparse_coo_tensor(numbers[None], everyone, parameter.shape, check_invariants=False).coalesce()
        was_dense = parameter.grad is not None and parameter.grad.layout is torch.strided
        parameter.grad = mean.to_dense() if was_dense else mean


def _rows(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers (rows,) and values (rows, ...) of the rows in a parameter's gradient."""
    gradient = parameter.grad
    if gradient is None:
        empty = torch.zeros(0, dtype=torch.int64, device=parameter.device)
        return empty, parameter.new_zeros(0, *parameter.shape[1:])
    if gradient.layout is torch.strided:
        return torch.arange(len(gradient), device=gradient.device), gradient
    gradient = gradient.coalesce()
    return gradient.indices()[0], gradient.values()
