"""One rank's parameters and buffers to every rank."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from allstep.comm.communicator import Communicator

__all__ = [
    "broadcast_states",
    "buffers_of",
    "describe_states",
    "parameters_of",
    "rename_to_fit",
    "send_buffers",
    "states_to_compare",
]


def rename_to_fit(state_dict: dict[str, Any], prefix: str, expected: Collection[str]) -> None:
    """Give the entries of `state_dict` under `prefix` the names in `expected`, where only names of wrappers differ."""
    keys = [key for key in state_dict if key.startswith(prefix)]
    bare = {key: f"{prefix}module.{key.removeprefix(prefix)}" for key in keys}
    if set(keys) == set(expected):
        return
    if set(bare.values()) != set(expected):  # a model may have a part of its own that is named as a wrapper's is
        names = {_without_wrappers(name, prefix): name for name in expected}
        bare = {key: names.get(_without_wrappers(key, prefix), key) for key in keys}
    renamed = {bare[key]: state_dict.pop(key) for key in keys}
    state_dict.update(renamed)


def _without_wrappers(name: str, prefix: str) -> str:
    """The name that a state has in the bare module."""
    name = name.removeprefix(prefix).replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def broadcast_states(communicator: Communicator, tensors: Iterable[torch.Tensor], source: int = 0) -> None:
    """Collective. Overwrite `tensors` with the values of rank `source`, outside of autograd."""
    communicator.broadcast([tensor.detach() for tensor in tensors], source)


def buffers_of(module: nn.Module, ignored: set[str]) -> list[torch.Tensor]:
    """The buffers of `module` as they are now; a forward may have replaced some."""
    return [buffer for name, buffer in module.named_buffers() if name not in ignored]


def send_buffers(communicator: Communicator, module: nn.Module, ignored: Collection[str] = (), source: int = 0) -> None:
    """Collective. The buffers of rank `source` to all.

    A graph that is still to be used may hold buffers. Running statistics are read by no backward of a layer in training, so
    writing them is not counted as a change, or that backward would refuse to run; others are written where their values differ
    (test_reports_buffers.py). On accelerators nothing is compared, which would make the host wait.
    """
    ignored = {*ignored, *getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
    buffers = buffers_of(module, ignored)
    unread = {id(buffer) for buffer in _running_statistics(module)}
    compared = [buffer for buffer in buffers if id(buffer) not in unread and buffer.device.type == "cpu"]
    received = {id(buffer): buffer.detach().clone() for buffer in compared}
    written = tuple(buffer for buffer in buffers if id(buffer) not in received)
    with torch.autograd._unsafe_preserve_version_counter(written) if written else nullcontext():  # type: ignore[attr-defined]
        broadcast_states(communicator, [received.get(id(buffer), buffer) for buffer in buffers], source)
    for buffer in compared:
        if not torch.equal(buffer, received[id(buffer)]):
            buffer.detach().copy_(received[id(buffer)])


def _running_statistics(module: nn.Module) -> Iterator[torch.Tensor]:
    layers = (layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.training)
    return (buffer for layer in layers for buffer in layer.buffers(recurse=False))


def parameters_of(module: nn.Module, ignored: set[str]) -> list[torch.Tensor]:
    """The parameters of `module`, trainable and frozen."""
    return [parameter for name, parameter in module.named_parameters() if name not in ignored]


def describe_states(module: nn.Module, ignored: set[str]) -> list[str]:
    """A line for each parameter and buffer: what has to be equal on all ranks before they may train together."""
    lines = [
        f"{name}: {_kind(parameter)}{_order(parameter)}{'' if parameter.requires_grad else ', frozen'}"
        for name, parameter in module.named_parameters()
        if name not in ignored
    ]
    return lines + [f"{name}: {_kind(b)}, buffer" for name, b in module.named_buffers() if name not in ignored]


def states_to_compare(
    module: nn.Module, ignored: set[str], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
    """Kind, and names with tensors, of all that has to be equal on ranks that train together."""
    parameters = {name: parameter for name, parameter in module.named_parameters() if name not in ignored}
    yield "parameter", list(parameters.items())
    yield "buffer", [(name, buffer) for name, buffer in module.named_buffers() if name not in ignored]
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in parameters.items()}
        states = []
        for group in optimizer.param_groups:
            settings = {key: value for key, value in sorted(group.items()) if isinstance(value, (int, float, torch.Tensor))}
            for key, value in settings.items():
                states.append((f"{key} of a parameter group", torch.as_tensor(value)))
            for number, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"parameter {number}")
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, (torch.Tensor, float, int)):
                        states.append((f"{key} of {name}", torch.as_tensor(value)))
        yield "optimizer state", states


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _order(parameter: torch.Tensor) -> str:
    """Gradients lie in a bucket in the order of their parameter's memory, so that has to be equal too."""
    return "" if parameter.is_contiguous() else f" with strides {list(parameter.stride())}"
