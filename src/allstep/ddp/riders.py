"""What the ranks tell each other beside gradients: a few numbers that ride behind the last bucket, at no collective more.

Summed over ranks by that bucket's collective are: how many ranks used each parameter; three numbers in a place for each rank,
which are its `Word`; and three numbers of the caller. Only where the words do not agree are names exchanged, and all ranks
raise the same error.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from allstep.comm.communicator import Communicator
from allstep.ddp.alike import first_difference_in_training
from allstep.ddp.unused import unused_message
from allstep.errors import RankFailedError, ReplicaError, UnusedParametersError

__all__ = ["Evidence", "Riders", "Status", "Totals", "Word", "raise_what_was_said"]


class Status(enum.IntEnum):
    """How a rank fared in a backward."""

    WELL = 0
    LACKS_GRADIENTS = 1
    FAILED = 2


@dataclass(frozen=True)
class Word:
    """What one rank says of itself in a reduction; whole numbers below 2**24, which float32 holds exactly."""

    status: int
    forwards: int
    """0 of a rank that ran no backward and said so; else 2 x (1 + the forwards that no backward has followed), and 1 more where
    this backward is the first of its forward."""
    training: int
    """Signature of the parameters that it trains, never 0."""


@dataclass(frozen=True)
class Totals:
    """What the last reduction summed over ranks beside gradients, as 0-dim float32 tensors on the gradients' device."""

    sums: torch.Tensor
    """(3,): `weight`, `carried` and `hands`."""

    @property
    def weight(self) -> torch.Tensor:
        """What gradients were divided by; the number of ranks where nobody called `weigh`."""
        return self.sums[0]

    @property
    def carried(self) -> torch.Tensor:
        """The sum of the number that travelled with it."""
        return self.sums[1]

    @property
    def hands(self) -> torch.Tensor:
        """How many ranks raised a hand; see `DistributedDataParallel.raise_hand_if`."""
        return self.sums[2]


@dataclass(frozen=True)
class Evidence:
    """What this rank can tell the others where the words do not agree; asked for only then."""

    wrapper: int
    """The number of the wrapper whose gradients it brought."""
    failure: str | None
    """Why it could not bring its gradients."""
    training: Callable[[], Mapping[str, str]]
    """Name of each parameter -> whether it is trained."""
    lacking: Callable[[], Mapping[str, bool]]
    """Name of each parameter that lacks a gradient -> whether the forward used it."""


class Riders:
    """The numbers behind the last bucket's gradients; on the CPU they are written and read in place, through numpy.

    Args:
        numbers: (count(parameters, size),) float32, a view of the bucket.
        parameters: how many are reduced.
        communicator: the ranks that say them.
    """

    @staticmethod
    def count(parameters: int, size: int) -> int:
        """How many numbers ride for so many parameters and ranks."""
        return parameters + 3 * size + 3

    def __init__(self, numbers: torch.Tensor, parameters: int, communicator: Communicator) -> None:
        self.numbers = numbers
        self.used = numbers[:parameters]
        """By parameter, the ranks that used it."""
        self.words = numbers[parameters:-3]
        """(3 x size,): what all ranks said, for `raise_what_was_said`; valid until the next backward."""
        self._sums = numbers[-3:]
        self._staging = numbers if numbers.device.type == "cpu" else torch.zeros(numbers.shape)
        self._parameters, self._rank, self._size = parameters, communicator.rank, communicator.size

    def write(
        self, used: bytearray, word: Word, weight: float, carried: float | torch.Tensor, hand: bool, scale: float = 1.0
    ) -> None:
        """Put this rank's numbers in, times `scale`, which undoes a division by the collective itself."""
        # taken anew each time: share_memory_() of a gradient moves the whole storage (test_gradient_memory.py)
        array, own = self._staging.numpy(), self._parameters + self._rank
        array[: self._parameters] = np.frombuffer(used, dtype=np.uint8)
        array[self._parameters : -3] = 0.0
        array[own : -3 : self._size] = word.status, word.forwards, word.training
        array[-3] = weight
        array[-2] = 0.0 if isinstance(carried, torch.Tensor) else carried
        array[-1] = hand
        if self._staging is not self.numbers:
            self.numbers.copy_(self._staging)
        if isinstance(carried, torch.Tensor):
            self._sums[1] = carried
        if scale != 1.0:
            self.numbers.mul_(scale)

    def totals(self) -> Totals:
        """The caller's three numbers, summed over ranks."""
        return Totals(self._sums + 0)  # a copy


def raise_what_was_said(
    said: torch.Tensor, reduction: int, communicator: Communicator, gather_evidence: Callable[[], Evidence]
) -> None:
    """Raise what all ranks together make of their words; collective only where that is an error.

    Args:
        said: (3 x size,), as `Riders.words` gives it.
        reduction: its number, counted from 0.
        communicator: the ranks.
        gather_evidence: gives what this rank can add.

    Raises:
        RankFailedError: some ranks abandoned this reduction, or ran a forward that no backward followed, and others did not.
        ReplicaError: the ranks do not train the same parameters.
        UnusedParametersError: some rank lacks a gradient that it was promised.
    """
    numbers = list(map(round, said.tolist()))
    statuses, forwards, training = (numbers[row * communicator.size :][: communicator.size] for row in range(3))
    if not any(statuses) and min(forwards) == max(forwards) and min(training) == max(training):
        return
    evidence = gather_evidence()
    failed = [rank for rank, status in enumerate(statuses) if status == Status.FAILED]
    if failed and len(failed) < len(statuses):
        reasons = communicator.all_gather_object(evidence.failure)
        told = "; ".join(f"rank {rank}: {reasons[rank]}" for rank in failed)
        raise RankFailedError(f"Rank {communicator.rank} stops because another rank failed: {told}")
    if len(set(training) - {0}) > 1:
        wrappers, states = zip(*communicator.all_gather_object((evidence.wrapper, dict(evidence.training()))), strict=True)
        if len(set(wrappers)) > 1:
            raise ReplicaError(_wrappers_message(communicator.rank, wrappers))
        raise ReplicaError(f"The ranks do not train the same parameters: {first_difference_in_training(states)}")
    skipped = _ranks_that_skipped(forwards)
    if skipped:
        raise RankFailedError(_skipped_message(communicator.rank, reduction, skipped))
    repeated = [rank for rank, number in enumerate(forwards) if number and not number % 2]
    if repeated and any(number % 2 for number in forwards):
        raise RankFailedError(_repeated_message(communicator.rank, reduction, repeated))
    if Status.LACKS_GRADIENTS in statuses:
        raise UnusedParametersError(unused_message(communicator.all_gather_object(dict(evidence.lacking()))))


def _wrappers_message(rank: int, wrappers: Sequence[int]) -> str:
    brought = ", ".join(f"rank {other} those of wrapper {wrapper}" for other, wrapper in enumerate(wrappers))
    return (
        f"Rank {rank}: the ranks brought gradients of different wrappers to one reduction: {brought} (counted from 1 in the "
        f"order in which they were made). Call backward() of several wrapped models in the same order, and equally often, on "
        f"every rank; or wrap them as one module. The optimizer has not moved."
    )


def _ranks_that_skipped(forwards: Sequence[int]) -> list[int]:
    """The ranks with more unanswered forwards than another that ran some."""
    least = min(filter(None, forwards), default=0) // 2
    return [rank for rank, number in enumerate(forwards) if least and number // 2 > least]


def _repeated_message(rank: int, reduction: int, repeated: Sequence[int]) -> str:
    return (
        f"Rank {rank} stops in reduction {reduction}, counted from 0: in it, rank(s) {', '.join(map(str, repeated))} ran a "
        f"backward that is not the first one of its forward (a second loss, or retain_graph=True), and the others the first "
        f"one of a new forward. Run equally many backwards on every rank, or add the losses and call backward() once."
    )


def _skipped_message(rank: int, reduction: int, skipped: Sequence[int]) -> str:
    return (
        f"Rank {rank} stops in reduction {reduction}, counted from 0: before it, rank(s) {', '.join(map(str, skipped))} ran a "
        f"forward that no backward followed, and the others did not. Where a batch is skipped, all ranks have to skip: ask "
        f"allstep.all_ranks_agree first. A forward that is only looked at belongs under torch.no_grad()."
    )
