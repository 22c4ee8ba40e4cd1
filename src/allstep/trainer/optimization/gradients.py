"""What is done with all gradients of a step, in as few calls as give torch's own bits.

A small model spends its time in calls, not in arithmetic: torch's functions look at devices, dtypes, subclasses and tracing
each time. What is not plain is left to them.
"""

import ctypes
from collections.abc import Sequence

import torch

__all__ = ["backward", "clip_gradients", "drop_gradients", "gradient_norm"]

_FOREACH_DEVICES = frozenset({"cpu", "cuda"})
"""Device types on which torch clips by its `_foreach` functions; elsewhere it decides by itself."""


def backward(loss: torch.Tensor, weight: float) -> None:
    """Accumulate the gradients of `weight` x `loss`, which is one number."""
    loss.backward(torch.full_like(loss, weight))


@torch.no_grad()
def clip_gradients(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients down to a common norm of `max_norm` where it is larger, and give the norm before, 0-dim.

    The bits are those of `torch.nn.utils.clip_grad_norm_`, which groups gradients by device and dtype twice. On the CPU,
    gradients whose norm is small enough are not multiplied by one.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not _are_alike(gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = gradient_norm(parameters)
    if norm.device.type == "cpu" and norm.dtype is torch.float32:
        scale = _scale(norm.item(), max_norm)
        if scale != 1.0:  # NaN scales too, as it does in torch
            torch._foreach_mul_(gradients, scale)
    else:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


@torch.no_grad()
def gradient_norm(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """The common norm of all gradients, 0-dim; what `clip_gradients` gives, with nothing scaled."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not _are_alike(gradients):
        return torch.nn.utils.get_total_norm([each.coalesce().values() if each.is_sparse else each for each in gradients])
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    return norm


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.zero_grad()`, by plain assignments where it is torch's own, which opens a profiler's span."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _are_alike(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether there are some, all of one dtype on one device that `_foreach` functions take."""
    if not gradients:
        return False
    dtype, device = gradients[0].dtype, gradients[0].device
    return device.type in _FOREACH_DEVICES and all(
        type(each) is torch.Tensor and each.layout is torch.strided and each.dtype is dtype and each.device == device
        for each in gradients
    )


def _scale(norm: float, max_norm: float) -> float:
    """`torch.clamp(max_norm / (norm + 1e-6), max=1.0)` of a float32 tensor, to the bit, in numbers.

    Rounding the double result of one operation on singles gives what the operation gives in singles: 53 bits are more than
    twice 24. torch divides one by the sum and then multiplies.
    """
    inverse = _single(1.0 / _single(norm + _single(1e-6)))
    return min(_single(inverse * _single(max_norm)), 1.0) if norm == norm else norm


def _single(value: float) -> float:
    return ctypes.c_float(value).value
