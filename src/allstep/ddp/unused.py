"""Which parameters a graph reaches: what `find_unused_parameters=True` asks before each backward."""

import dataclasses
from collections.abc import Iterator, Mapping

import torch

__all__ = ["reached_parameters", "tensors_in"]


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor inside `value`: mappings, sequences, sets, dataclasses and plain objects are searched."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif id(item) in seen or isinstance(item, (str, bytes, int, float, bool, type(None), torch.nn.Module)):
            continue
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(reversed(list(item)))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            stack.extend(getattr(item, field.name) for field in reversed(dataclasses.fields(item)))
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            stack.extend(reversed(list(vars(item).values())))
        seen.add(id(item))


def reached_parameters(outputs: object) -> set[int]:
    """The `id` of every leaf tensor to which a backward from the tensors inside `outputs` would give a gradient."""
    reached: set[int] = set()
    stack = []
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            stack.append(tensor.grad_fn)
        elif tensor.requires_grad:
            reached.add(id(tensor))
    seen = set(stack)
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)  # only AccumulateGrad nodes have one
        if leaf is not None:
            reached.add(id(leaf))
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return reached
