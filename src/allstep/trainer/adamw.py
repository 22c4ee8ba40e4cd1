"""torch's fused AdamW, with less Python around the same kernel.

For a small model most of an optimizer step is not arithmetic: parameters are grouped by device and dtype, and the kernel is
called once for each parameter group. Here groups that differ in nothing but their parameters are one call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam

__all__ = ["AdamW"]

_PLAIN = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of a group under which torch's own function does the step."""


class _Batch:
    """Parameters of one dtype on one device that are moved by the same numbers, and what goes with each."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self.parameters: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.averages: list[torch.Tensor] = []
        self.squares: list[torch.Tensor] = []
        self.steps: list[torch.Tensor] = []

    def apply(self) -> None:
        """One call of the kernel. The bits are those of one call for each parameter."""
        group = self.group
        beta1, beta2 = group["betas"]
        torch._foreach_add_(self.steps, 1)
        torch._fused_adamw_(
            self.parameters,
            self.gradients,
            self.averages,
            self.squares,
            [],
            self.steps,
            amsgrad=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(..., fused=True)`: the same arguments, state and bits.

    Options that a loaded state brings along, another device for some parameters, and gradient scaling are left to torch.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters that have gradients; gives what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            batches: dict[tuple[Any, ...], _Batch] = {}
            for group in self.param_groups:
                if not self._gather(group, batches):
                    self._step_of_torch(group)
            for batch in batches.values():
                batch.apply()
        return loss

    def _gather(self, group: dict[str, Any], batches: dict[tuple[Any, ...], _Batch]) -> bool:
        """Put the parameters of `group` into the batch that fits; False where torch has to move them."""
        if not group["fused"] or any(group[name] for name in _PLAIN) or getattr(self, "grad_scale", None) is not None:
            return False
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not moved:
            return True
        dtype, device, rate = moved[0].dtype, moved[0].device, group["lr"]
        if isinstance(rate, torch.Tensor):
            return False
        key = (dtype, device, rate, *group["betas"], group["eps"], group["weight_decay"])
        batch = batches.get(key) or _Batch(group)
        states = [self.state[parameter] for parameter in moved]
        for parameter, state in zip(moved, states, strict=True):
            gradient = parameter.grad
            if not state or parameter.dtype is not dtype or parameter.device != device or gradient.layout is not torch.strided:
                return False
        batches[key] = batch
        batch.parameters += moved
        batch.gradients += [parameter.grad for parameter in moved]
        batch.averages += [state["exp_avg"] for state in states]
        batch.squares += [state["exp_avg_sq"] for state in states]
        batch.steps += [state["step"] for state in states]
        return True

    def _step_of_torch(self, group: dict[str, Any]) -> None:
        """What torch's `step` does for one group; it also makes the state, in the first step."""
        parameters: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        averages: list[torch.Tensor] = []
        squares: list[torch.Tensor] = []
        largest: list[torch.Tensor] = []
        steps: list[torch.Tensor] = []
        has_complex = self._init_group(group, parameters, gradients, averages, squares, largest, steps)
        beta1, beta2 = group["betas"]
        adam(
            parameters,
            gradients,
            averages,
            squares,
            largest,
            steps,
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            has_complex=has_complex,
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
