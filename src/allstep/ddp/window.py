"""What the reducer knows of the time since its last reduction: the forwards that ran, and the gradients that came."""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from allstep.ddp.alike import Changes, signature
from allstep.ddp.riders import Status, Word
from allstep.ddp.unused import reached_from

__all__ = ["Forward", "Window"]

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class Forward:
    """One forward whose backward is to be reduced."""

    __slots__ = ("is_answered",)

    def __init__(self) -> None:
        self.is_answered = False
        """Whether a backward that leaves gradients has come to its outputs."""


@dataclass(slots=True)
class Window:
    """One window of one rank; a new one begins after each reduction."""

    touched: bytearray
    """By parameter, 1 where it got a gradient on this rank."""
    weight: tuple[float, float | torch.Tensor] | None = None
    """The caller's numbers; None divides by ranks."""
    has_forward: bool = False
    """A forward whose backward is to be reduced has run."""
    unanswered: set["Forward"] = field(default_factory=set)
    """Forwards whose outputs no backward has reached."""
    is_first: bool = False
    """Its backward is the first one that reached the outputs of a forward."""
    unreached: set[int] = field(default_factory=set)
    """Parameters that get no gradient and need not be waited for."""
    roots: Sequence[Any] = ()
    """Graph nodes of the outputs of the last forward."""
    has_graph: bool = False
    """The backward ran with create_graph=True."""
    lacking: Sequence[int] = ()
    """Parameters that were promised a gradient and got none."""
    excused: bool = False
    """This rank ran no backward, and said so."""
    failure: str | None = None
    """Why this rank cannot bring its gradients."""
    broken: str | None = None
    """What broke off, of which the others do not know yet."""

    trained: bytes = b""
    """By parameter, 1 where it required a gradient when the last forward ran; empty before one."""

    def expect(self, parameters: Sequence[torch.Tensor], unreached: Collection[int], roots: Sequence[Any]) -> None:
        """A forward has run; see `Reducer.arm`."""
        self.trained = bytes(map(_REQUIRES_GRAD, parameters))
        known = {*unreached, *_zeros(self.trained)}
        # several forwards before one backward: what one of them reaches will get a gradient
        self.unreached = known & self.unreached if self.has_forward else known
        self.has_forward = True
        self.roots = roots

    def answer(self, forward: Forward) -> None:
        """A backward that leaves gradients has come to the outputs of `forward`."""
        self.is_first |= not forward.is_answered
        forward.is_answered = True

    def untouched(self) -> list[int]:
        """Parameters without a gradient."""
        return _zeros(self.touched)

    def word(self, parameters: Sequence[torch.Tensor], changes: Changes, *, strict: bool, number: int) -> Word:
        """What to tell the other ranks of wrapper `number`; with `strict`, of parameters that lack a gradient too."""
        if strict and not self.excused:
            excused = self.unreached | changes.gone  # frozen when the forward ran, or not there any more
            self.lacking = [i for i in self.untouched() if parameters[i].requires_grad and i not in excused]
        status = Status.FAILED if self.failure else Status.LACKS_GRADIENTS if self.lacking else Status.WELL
        forwards = 0 if self.excused else 2 * (1 + len(self.unanswered)) + self.is_first
        return Word(status, forwards, signature(self.trained or bytes(map(_REQUIRES_GRAD, parameters)), changes, number))

    def lacking_by_name(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> Mapping[str, bool]:
        """The parameters that lack a gradient here; True where the forward used them."""
        if not self.lacking:
            return {}
        reached = reached_from(self.roots)
        return {names[index]: id(parameters[index]) in reached for index in self.lacking}


def _zeros(flags: bytes | bytearray) -> list[int]:
    """Where they are 0."""
    return [index for index, flag in enumerate(flags) if not flag] if 0 in flags else []
