"""Rank 0's parameters and buffers to every rank."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from allstep.comm.communicator import Communicator

__all__ = ["broadcast_states", "buffers_of", "describe_states", "states_to_compare"]


def broadcast_states(communicator: Communicator, tensors: Iterable[torch.Tensor]) -> None:
    """Collective. Overwrite `tensors` with rank 0's values, outside of autograd."""
    communicator.broadcast([tensor.detach() for tensor in tensors])


def buffers_of(module: nn.Module, ignored: set[str]) -> list[torch.Tensor]:
    """The buffers of `module` as they are now; a forward may have replaced some."""
    return [buffer for name, buffer in module.named_buffers() if name not in ignored]


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
