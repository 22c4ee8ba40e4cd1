"""Gradients of several ranks beside those of one process: the same bits on every rank, and the mean over ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

__all__ = ["Gradients", "assert_mean", "gradients_of", "mean_of_ranks"]

Gradients = dict[str, torch.Tensor | None]
"""Name of a parameter -> its gradient, or None where it has none."""


def gradients_of(module: nn.Module) -> Gradients:
    """Copies of the gradients of `module`; sparse ones come as dense."""
    return {name: _dense(parameter.grad) for name, parameter in module.named_parameters()}


def mean_of_ranks(size: int, run: Callable[[int], nn.Module]) -> Gradients:
    """What `size` ranks have to agree on, computed in one process.

    Args:
        run: `run(rank)` makes a model, runs forward and backward with that rank's data, and returns the model.
    """
    each = [gradients_of(run(rank)) for rank in range(size)]
    mean: Gradients = {}
    for name in each[0]:
        found = [gradient for gradients in each if (gradient := gradients[name]) is not None]
        mean[name] = torch.stack(found).sum(0) / size if found else None
    return mean


def assert_mean(
    ranks: Sequence[Mapping[str, torch.Tensor | None]],
    expected: Mapping[str, torch.Tensor | None],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Fail unless `ranks` hold the same bits, close to `expected`, and None exactly where that is None."""
    for rank, gradients in enumerate(ranks):
        assert gradients.keys() == expected.keys(), f"rank {rank} has {gradients.keys() ^ expected.keys()} too many or too few"
        for name, value in expected.items():
            gradient, first = gradients[name], ranks[0][name]
            if value is None or gradient is None or first is None:
                assert gradient is value, f"{name} on rank {rank}: {gradient}, expected {value}"
                continue
            assert torch.equal(gradient, first), f"{name}: rank {rank} has {gradient}, rank 0 has {first}"
            torch.testing.assert_close(gradient, value, rtol=rtol, atol=atol, msg=partial("{}: {}".format, name))


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach().clone()
