"""Optimizers that step inside a backward, as `torch.distributed.optim._apply_optimizer_in_backward` makes them.

torch calls them as soon as a gradient has come, which is that of one rank. Here they step when the mean is there.
"""

from collections.abc import Iterable, Sequence

import torch

__all__ = ["step_in_backward", "take_over_optimizers"]


def take_over_optimizers(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `parameters` that have optimizers of their own, which from now on step in `step_in_backward` alone."""
    found = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    if found:
        from torch.distributed.optim import apply_optimizer_in_backward as theirs  # loads much, and is seldom needed

        for parameter in found:
            for handle in theirs.param_to_optim_hook_handle_map.pop(parameter, ()):
                handle.remove()
    return found


def step_in_backward(parameters: Sequence[torch.Tensor]) -> None:
    """Step the optimizers of `parameters`, and drop the gradients, as torch does."""
    for parameter in parameters:
        for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
            optimizer.step()
        parameter.grad = None
