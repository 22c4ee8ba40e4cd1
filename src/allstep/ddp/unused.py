"""Which parameters a graph reaches: what `find_unused_parameters=True` asks before each backward."""

import dataclasses
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = [
    "reached_from",
    "reached_parameters",
    "taken_message",
    "tensors_in",
    "unexpected_message",
    "unreached_parameters",
    "unused_message",
]


_SCALARS = (str, bytes, int, float, bool, type(None))
_NO_CONTAINERS = (*_SCALARS, torch.nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor inside `value`: mappings, sequences, sets, dataclasses and plain objects are searched."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif id(item) in seen or isinstance(item, _NO_CONTAINERS):
            continue
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            stack.extend(each for each in reversed(list(item)) if not isinstance(each, _SCALARS))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            stack.extend(getattr(item, field.name) for field in reversed(dataclasses.fields(item)))
        elif not isinstance(item, type):
            stack.extend(reversed(list(_attributes(item))))
        seen.add(id(item))


def _attributes(item: object) -> Iterator[object]:
    """What a plain object holds, in `__slots__` or in its `__dict__`."""
    for kind in reversed(type(item).__mro__):
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(item, name):
                yield getattr(item, name)
    yield from getattr(item, "__dict__", {}).values()


def reached_parameters(outputs: object) -> set[int]:
    """The `id` of every leaf tensor to which a backward from the tensors inside `outputs` would give a gradient."""
    tensors = list(tensors_in(outputs))
    leaves = {id(tensor) for tensor in tensors if tensor.grad_fn is None and tensor.requires_grad}
    return leaves | reached_from(tensor.grad_fn for tensor in tensors)


def unreached_parameters(outputs: object, index_of: Mapping[int, int]) -> Collection[int]:
    """Which parameters a backward from `outputs` will leave without a gradient, where that can be known.

    Args:
        index_of: `id` of each parameter -> its index.
    """
    roots = [tensor.grad_fn for tensor in tensors_in(outputs)]
    reached = reached_parameters(outputs)
    if reached.isdisjoint(index_of) or any("Checkpoint" in node.name() for node in _nodes(roots)):
        return ()  # outputs that cannot be searched, or a graph that is made only in backward
    return [index for parameter, index in index_of.items() if parameter not in reached]


def reached_from(roots: Iterable[Any]) -> set[int]:
    """The `id` of every leaf tensor that the graph nodes `roots` lead to; some may be None."""
    leaves = (getattr(node, "variable", None) for node in _nodes(roots))  # only AccumulateGrad nodes have one
    return {id(leaf) for leaf in leaves if leaf is not None}


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Every graph node that `roots` lead to, each once."""
    stack = [node for node in roots if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)


def unused_message(of_rank: Sequence[Mapping[str, bool]]) -> str:
    """What to tell a person of parameters without a gradient.

    Args:
        of_rank: by rank, the parameters that lack one there; True where the forward used them.
    """
    ranks: dict[tuple[str, bool], list[int]] = {}
    for rank, lacking in enumerate(of_rank):
        for name, was_used in lacking.items():
            ranks.setdefault((name, was_used), []).append(rank)
    groups: dict[tuple[bool, str], list[str]] = {}
    for (name, was_used), lack_it in ranks.items():
        groups.setdefault((was_used, ", ".join(map(str, lack_it))), []).append(name)
    sentences = []
    for (was_used, where), names in sorted(groups.items()):
        what = "Used in forward" if was_used else "Not used in forward"
        why = ", but the outputs that use them did not enter the loss" if was_used else ""
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        sentences.append(f"{what} on rank(s) {where}{why}: {shown}.")
    count = len({name for lacking in of_rank for name in lacking})
    return (
        f"{count} parameter{'s' if count > 1 else ''} got no gradient in this backward. {' '.join(sentences)} Set "
        f"find_unused_parameters=None to let ranks without a gradient take part with zeros, or True to find such parameters "
        f"before each backward. The optimizer has not moved."
    )


def unexpected_message(rank: int, name: str) -> str:
    """What to tell a person of a parameter that got a gradient though none was expected."""
    return (
        f"Rank {rank}: {name!r} got a gradient that was not expected, after its bucket had been sent. It was frozen when "
        f"forward ran, and no more in backward; or, with static_graph=True, the first backward did not use it, and every "
        f"backward has to use the same parameters; or, with find_unused_parameters=True, an object that forward returns hides "
        f"tensors: return them in tuples, lists, dicts or dataclasses, or set find_unused_parameters=None. The optimizer has "
        f"not moved."
    )


def taken_message(rank: int, names: Sequence[str]) -> str:
    """What to tell a person of gradients that were taken away before they were reduced."""
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return (
        f"Rank {rank}: the gradients of {shown} came in this backward and were gone before they were reduced. A hook "
        f"(register_post_accumulate_grad_hook) has set them to None, and if it has stepped an optimizer, then with this rank's "
        f"own gradient, so the replicas differ by now. Step after backward(), or use torch's _apply_optimizer_in_backward, "
        f"which waits for the mean here."
    )
