"""In which order the samples of an epoch come: a function of the epoch alone, equal on every rank and after a resume.

The grid (`grid.py`) cuts an order into steps, micro-batches and ranks; so whatever the order is, no two ranks run the same
place of it, and a step consists of the same samples at any number of ranks.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from allstep.data.seeding import mixed, preserved_generators, seed_generators
from allstep.errors import DataError

__all__ = ["BalancedOrder", "LengthGroupedOrder", "Order", "SampledOrder", "SequentialOrder", "ShuffledOrder", "order_of"]

BLOCK = 50
"""Global batches among which samples are put together by their lengths."""


class Order(Sampler[int]):
    """The places of an epoch, and the sample at each. A torch sampler too, of the epoch that `set_epoch` named last."""

    _epoch = 0
    _known: tuple[int, Any] | None = None  # an epoch and its places

    @abstractmethod
    def __len__(self) -> int:
        """Places in an epoch."""

    @abstractmethod
    def places(self, epoch: int) -> Any:
        """What is at each place, a sequence or int64 tensor: a sample's index in the dataset, or a list of those of a batch."""

    def take(self, epoch: int, start: int, stop: int) -> list[int]:
        """Indices in the dataset of the samples at places from `start` to `stop` of `epoch`."""
        if self._known is None or self._known[0] != epoch:
            self._known = epoch, self.places(epoch)
        taken = self._known[1][start:stop]
        found = taken.tolist() if isinstance(taken, torch.Tensor) else list(taken)
        return [index for each in found for index in each] if found and isinstance(found[0], (list, tuple)) else found

    def set_epoch(self, epoch: int) -> None:
        """The epoch that iterating gives."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        places = self.places(self._epoch)
        return iter(places.tolist() if isinstance(places, torch.Tensor) else places)


class SequentialOrder(Order):
    """0, 1, 2, … in every epoch."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def places(self, epoch: int) -> Sequence[int]:
        return range(self._samples)


class ShuffledOrder(Order):
    """A permutation in each epoch, int64, which depends on `seed` and the epoch."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed

    def __len__(self) -> int:
        return self._samples

    def places(self, epoch: int) -> Any:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % (1 << 63))
        return torch.randperm(self._samples, generator=generator)


class LengthGroupedOrder(ShuffledOrder):
    """Shuffled, with samples of like length together: each 50 global batches are sorted from long to short.

    The block with the longest sample comes first, so that a lack of memory shows at once.

    Args:
        lengths: of every sample.
        global_batch_size: samples of one optimizer step.
        seed: of the shuffling.
    """

    def __init__(self, lengths: Sequence[int], global_batch_size: int, seed: int) -> None:
        super().__init__(len(lengths), seed)
        self._lengths, self._block = lengths, BLOCK * global_batch_size

    def places(self, epoch: int) -> Sequence[int]:
        shuffled = super().places(epoch).tolist()
        blocks = [shuffled[start : start + self._block] for start in range(0, len(shuffled), self._block)]
        blocks = [sorted(block, key=self._lengths.__getitem__, reverse=True) for block in blocks]
        longest = max(range(len(blocks)), key=lambda at: self._lengths[blocks[at][0]], default=0)
        return [
            index for block in [*blocks[longest : longest + 1], *blocks[:longest], *blocks[longest + 1 :]] for index in block
        ]


class BalancedOrder(ShuffledOrder):
    """Shuffled, with the samples of each global batch dealt out so that its micro-batches are of about the same length.

    They are dealt from long to short, forth and back over the micro-batches: a step consists of the samples that it would
    consist of anyway.

    Args:
        lengths: of every sample.
        micro_batch_size: samples of a micro-batch.
        micro_batches: micro-batches of one optimizer step, on all ranks.
        seed: of the shuffling.
    """

    def __init__(self, lengths: Sequence[int], micro_batch_size: int, micro_batches: int, seed: int) -> None:
        super().__init__(len(lengths), seed)
        self._lengths, self._size, self._count = lengths, micro_batch_size, micro_batches

    def places(self, epoch: int) -> Sequence[int]:
        shuffled, step = super().places(epoch).tolist(), self._size * self._count
        dealt: list[int] = []
        for start in range(0, len(shuffled), step):
            whole = shuffled[start : start + step]
            dealt += self._dealt(whole) if len(whole) == step else whole  # what is left over fills no grid
        return dealt

    def _dealt(self, samples: list[int]) -> list[int]:
        hands: list[list[int]] = [[] for _ in range(self._count)]
        for at, index in enumerate(sorted(samples, key=self._lengths.__getitem__, reverse=True)):
            turn, place = divmod(at, self._count)
            hands[place if turn % 2 == 0 else self._count - 1 - place].append(index)
        return [index for hand in hands for index in hand]


class SampledOrder(Order):
    """What a sampler of the user's, or a batch sampler, gives in each epoch.

    Before it is asked, every generator that it may use is seeded by (seed, epoch): so it gives the same on all ranks, and in
    the same epoch after a resume. It may give an index more than once; ranks share what it gives without repeating any of it.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler, self._seed, self._length = sampler, seed, _length(sampler)
        generator = getattr(sampler, "generator", None)
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._own_seed = 0 if self._generator is None else self._generator.initial_seed()

    def __len__(self) -> int:
        if self._length is None:  # it may never end
            raise DataError(
                f"{type(self._sampler).__name__} has no length: expected a __len__ that says how many items it gives in an "
                f"epoch, by which steps are planned. Give it one, or train on an IterableDataset."
            )
        return self._length

    def places(self, epoch: int) -> Sequence[Any]:
        with preserved_generators():
            seed_generators(mixed(self._seed, epoch))
            if self._generator is not None:
                self._generator.manual_seed(mixed(self._own_seed, epoch))
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            given = [each.tolist() if isinstance(each, torch.Tensor) else each for each in self._sampler]
        if self._length is not None and len(given) != self._length:
            raise DataError(
                f"{type(self._sampler).__name__} gave {len(given)} items in epoch {epoch}, and its length is {self._length}: "
                f"expected as many in every epoch, by which steps are planned."
            )
        return given


def order_of(sampler: Any, samples: int, seed: int) -> Order:
    """The order that a torch sampler, or a batch sampler, stands for; one that shares samples among ranks, for all of them."""
    if isinstance(sampler, Order):
        return sampler
    if isinstance(sampler, DistributedSampler):
        return ShuffledOrder(samples, sampler.seed) if sampler.shuffle else SequentialOrder(samples)
    if type(sampler) is SequentialSampler:
        return SequentialOrder(len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples:
        return ShuffledOrder(samples, seed)
    if type(sampler) is BatchSampler and isinstance(sampler.sampler, DistributedSampler):
        sampler = BatchSampler(order_of(sampler.sampler, samples, seed), sampler.batch_size, sampler.drop_last)
    return SampledOrder(sampler, seed)


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None
