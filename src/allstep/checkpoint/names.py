"""Names of a model's tensors: those that the user's model has, whatever wrappers add to them.

Data-parallel wrappers and `torch.compile` hold a model under an attribute of theirs, so that names begin with `module.` or
`_orig_mod.`, or have that in the middle where a part of the model is wrapped. Nothing of it is written, and all of it is read.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

__all__ = ["clean_names", "unwrapped", "without_prefixes"]

_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "_forward_module",
}
"""Classes that hold the user's model under one attribute, by class name: torch's and allstep's alike."""
_PREFIXES = {*_WRAPPERS.values()}
"""Parts of names that wrappers add."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside data-parallel wrappers and `torch.compile`."""
    while (inner := _held_by_wrapper(model)) is not None:
        model = getattr(model, inner)
    return model


def clean_names(model: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """By key of a state_dict, the name in the user's model, parts of which may be wrapped or compiled."""
    held = {
        f"{path}.{inner}".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        if (inner := _held_by_wrapper(module)) is not None
    }
    parted = {key: key.split(".") for key in keys}
    return {
        key: ".".join(part for at, part in enumerate(parts) if ".".join(parts[: at + 1]) not in held)
        for key, parts in parted.items()
    }


def without_prefixes(values: Mapping[str, Any], own: Collection[str]) -> tuple[Mapping[str, Any], str]:
    """`values` under the names of `own` that differ only by what wrappers add, and what they added, in words.

    As they are, and "", where nothing was added, or it is not clear which tensor is meant.
    """
    if all(name in own for name in values):
        return values, ""
    by_bare = Counter(map(_bare, own))
    meant = {_bare(name): name for name in own}
    renamed = {name: name if name in own or by_bare[_bare(name)] != 1 else meant[_bare(name)] for name in values}
    if len({*renamed.values()}) < len(values):
        return values, ""
    added = sorted({part for old, new in renamed.items() if old != new for part in old.split(".") if part in _PREFIXES})
    return {renamed[name]: value for name, value in values.items()}, " and ".join(f"{part}." for part in added)


def _held_by_wrapper(module: nn.Module) -> str | None:
    """The attribute under which a wrapper holds the user's module; None for a module that is no wrapper."""
    for kind in type(module).__mro__:
        attribute = _WRAPPERS.get(kind.__name__)
        if attribute is not None and isinstance(getattr(module, attribute, None), nn.Module):
            return attribute
    return None


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)
