"""What all ranks have to do alike between two reductions, beside their gradients: which parameters they train.

Layers may be frozen, thawed, added and replaced after a model was wrapped. Each rank tells the others what it trains, as one
number that rides with the last bucket. Where numbers differ, names are exchanged, and all ranks raise the same error.
"""

import operator
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

__all__ = ["Changes", "Structure", "find_changes", "first_difference_in_training", "signature", "states_in_training"]

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_VALUES = operator.methodcaller("values")


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


class Structure:
    """Which layers and parameters a module had when its parameters were laid out; tells cheaply whether it still has them.

    Args:
        module: the module.
        ignored: names of parameters that are left alone.
        index_of: `id` of each parameter that is laid out -> its index.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], index_of: Mapping[int, int]) -> None:
        self._module, self._ignored, self._index_of = module, ignored, index_of
        self._changes = Changes()
        self._remember()

    def _remember(self) -> None:
        held = [held for layer in self._module.modules() for held in (layer._parameters, layer._modules)]
        self._held = [each for each in held if each]
        self._empty = [each for each in held if not each]
        self._buffers = [layer._buffers for layer in self._module.modules()]
        self._values = list(self._now())
        named = self._module.named_parameters()
        self._others = [p for n, p in named if id(p) not in self._index_of and n not in self._ignored]

    def _now(self) -> Iterator[object]:
        return chain.from_iterable(map(_VALUES, self._held))

    def has_buffers(self) -> bool:
        """Whether any layer has a buffer."""
        return any(self._buffers)

    def changes(self) -> Changes:
        """How it has changed since."""
        now = list(self._now())
        if any(self._empty) or len(now) != len(self._values) or not all(map(operator.is_, now, self._values)):
            self._remember()
        elif not self._changes and not any(map(_REQUIRES_GRAD, self._others)):
            return self._changes
        self._changes = find_changes(self._module, self._ignored, self._index_of)
        return self._changes


def find_changes(module: nn.Module, ignored: Collection[str], index_of: Mapping[int, int]) -> Changes:
    """Compare `module` as it is now with the parameters in `index_of` (`id` -> index)."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]
    if not all(parameter.is_leaf for _, parameter in named):
        return Changes()  # functional_call has put others in their place, for one forward
    new = tuple((name, parameter) for name, parameter in named if parameter.requires_grad and id(parameter) not in index_of)
    missing = index_of.keys() - {id(parameter) for _, parameter in named}
    return Changes(new, frozenset(index_of[identity] for identity in missing))


def states_in_training(names: Sequence[str], parameters: Sequence[torch.Tensor], changes: Changes) -> dict[str, str]:
    """Name of each parameter that is laid out, or new -> whether this rank trains it."""
    states = {
        name: "not there" if index in changes.gone else "trained" if parameter.requires_grad else "frozen"
        for index, (name, parameter) in enumerate(zip(names, parameters, strict=True))
    }
    return {**states, **changes.described()}


def signature(trained: bytes, changes: Changes, number: int = 0) -> int:
    """1 to 65535: the same on ranks that train the same parameters of the same wrapper.

    Args:
        trained: by parameter that is laid out, whether it is.
        changes: what is not laid out.
        number: that of the wrapper, equal on all ranks.
    """
    words = repr((changes.described(), sorted(changes.gone))).encode() if changes else b""
    return 1 + zlib.crc32(trained + words, number) % 0xFFFF


def first_difference_in_training(of_rank: Sequence[Mapping[str, str]]) -> str:
    """Say which parameter is not trained alike. `of_rank`: by rank, name -> "trained", "frozen" or what else it is."""
    advice = "Freeze, thaw, add and replace parameters alike on every rank, with the same values."
    for name in dict.fromkeys(name for states in of_rank for name in states):
        states = [each.get(name, "not there") for each in of_rank]
        rank = next((rank for rank, state in enumerate(states) if state != states[0]), None)
        if rank is not None:
            return f"{name!r} is {states[0]} on rank 0 and {states[rank]} on rank {rank}. {advice}"
    return f"they did not in the last backward, and do again by now. {advice}"


def _kind(parameter: torch.Tensor) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"


def _checksum(parameter: torch.Tensor) -> int:
    flat = parameter.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
