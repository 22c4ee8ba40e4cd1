"""Gradients of gradients: what is still right once gradients are means over ranks, and what cannot be."""

from typing import Any

import torch

__all__ = ["refusing_derivatives"]


def refusing_derivatives(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of an averaged gradient that says, when it is differentiated by its parameter, that this is not possible."""
    with torch.enable_grad():
        return _Averaged.apply(gradient.detach(), parameter)  # type: ignore[no-any-return]


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None]:
        raise RuntimeError(
            "These gradients are the mean over ranks by now, and the graphs of the other ranks are not here, so they cannot be "
            "differentiated. Take the gradients that enter your loss with torch.autograd.grad(loss, ..., create_graph=True), "
            "which gives this rank's own, and call backward() once, on the whole loss."
        )
