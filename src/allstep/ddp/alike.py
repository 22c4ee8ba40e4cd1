"""What all ranks have to do alike between two reductions, beside their gradients: which parameters they train.

Layers may be frozen, thawed, added and replaced after a model was wrapped. Each rank tells the others what it trains, as one
number that rides with the last bucket. Where numbers differ, names are exchanged, and all ranks raise the same error.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Changes", "find_changes", "first_difference_in_training", "signature"]


@dataclass(frozen=True)
class Changes:
    """How a model's trainable parameters differ from those that are laid out in buckets."""

    new: tuple[tuple[str, nn.Parameter], ...] = ()
    """Name and parameter of those that have no place yet."""
    gone: frozenset[int] = frozenset()
    """Indices of those that the model does not have any more."""

    def __bool__(self) -> bool:
        return bool(self.new or self.gone)

    def described(self) -> dict[str, str]:
        """Name of each new parameter -> what it is, its values included: they have to be the same on all ranks."""
        return {name: f"new: {_kind(parameter)}, checksum {_checksum(parameter):08x}" for name, parameter in self.new}


def find_changes(module: nn.Module, ignored: Collection[str], index_of: Mapping[int, int]) -> Changes:
    """Compare `module` as it is now with the parameters in `index_of` (`id` -> index). Cheap where nothing has changed."""
    present = _parameters(module)
    missing = index_of.keys() - {id(parameter) for parameter in present}
    new = {id(parameter) for parameter in present if parameter.requires_grad} - index_of.keys()
    if not new and not missing:
        return Changes()
    named = [(n, p) for n, p in module.named_parameters() if id(p) in new and n not in ignored]
    return Changes(tuple(named), frozenset(index_of[identity] for identity in missing))


def signature(trained: Iterable[bool], changes: Changes) -> int:
    """1 to 65535: the same on ranks that train the same parameters. `trained` tells it of those that are laid out."""
    words = [*changes.described().items()] if changes else []
    return 1 + zlib.crc32(bytes(trained) + repr((words, sorted(changes.gone))).encode()) % 0xFFFF


def first_difference_in_training(of_rank: Sequence[Mapping[str, str]]) -> str:
    """Say which parameter is not trained alike. `of_rank`: by rank, name -> "trained", "frozen" or what else it is."""
    advice = "Freeze, thaw, add and replace parameters alike on every rank, with the same values."
    for name in dict.fromkeys(name for states in of_rank for name in states):
        states = [each.get(name, "not there") for each in of_rank]
        rank = next((rank for rank, state in enumerate(states) if state != states[0]), None)
        if rank is not None:
            return f"{name!r} is {states[0]} on rank 0 and {states[rank]} on rank {rank}. {advice}"
    return f"they did not in the last backward, and do again by now. {advice}"


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    """All parameters; `Module.parameters` takes seven times as long."""
    found: list[nn.Parameter] = []
    stack = [module]
    while stack:
        layer = stack.pop().__dict__
        found.extend(parameter for parameter in layer["_parameters"].values() if parameter is not None)
        stack.extend(child for child in layer["_modules"].values() if child is not None)
    return found


def _kind(parameter: torch.Tensor) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"


def _checksum(parameter: torch.Tensor) -> int:
    flat = parameter.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
