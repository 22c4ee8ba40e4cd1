"""Native mixed precision: forward and backward in a low dtype, parameters and their gradients in full precision.

Parameters are cast inside autograd and put in their own place for one forward, so their gradients come back in the parameters'
dtype by themselves, on any device. The settings are torch's `_MixedPrecision`: any object with its three dtypes will do.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from allstep.ddp.comm_hooks import CommHook, GradBucket

__all__ = ["call_in_low_precision", "cast_buffers", "cast_inputs", "mark_parameters", "reduce_in"]


def call_in_low_precision(
    module: nn.Module, dtype: torch.dtype, ignored: Collection[str], inputs: Any, kwargs: Mapping[str, Any]
) -> Any:
    """`module(*inputs, **kwargs)` with floating parameters cast to `dtype`; those named in `ignored` stay as they are."""
    cast = {
        name: parameter.to(dtype)
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and name not in ignored
    }
    return functional_call(module, cast, inputs, dict(kwargs))


def cast_buffers(module: nn.Module, dtype: torch.dtype, ignored: Collection[str]) -> None:
    """Cast the floating buffers of `module` to `dtype`, for good, as torch does."""
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and name not in ignored:
            buffer.data = buffer.to(dtype)


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor in tuples, lists and dicts cast to `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_inputs(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast_inputs(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: cast_inputs(item, dtype) for key, item in value.items()}
    return value


def mark_parameters(module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
    """Put torch's two names onto each parameter that is cast: `_fp_param` is its own memory, `_mp_param` tells the low dtype.

    The low form exists inside of a forward only, so the tensor here is empty.
    """
    for name, parameter in module.named_parameters():
        if dtype is not None and parameter.is_floating_point() and name not in ignored:
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]
            parameter._mp_param = torch.empty(0, dtype=dtype, device=parameter.device)  # type: ignore[attr-defined]


def reduce_in(dtype: torch.dtype, hook: CommHook) -> CommHook:
    """`hook` on gradients cast to `dtype`; its result comes back in the bucket's own."""

    def averaged(state: Any, bucket: GradBucket) -> "torch.futures.Future[torch.Tensor]":
        full = bucket.buffer()
        bucket.set_buffer(full.to(dtype))
        return hook(state, bucket).then(lambda future: full.copy_(future.value().reshape(-1)))

    return averaged
