"""Which samples of a stream make up which step, and who reads what. Pure: numbers in, numbers out.

A stream is read from its beginning; its order is the one in which one process would read it. Split "by samples", step t takes
the next global batch of that order, cut into the same grid of micro-batches as map-style data (see `grid.py`):

    | 0 1 | 2 3 | 4 5 | 6 7 |             | 8 9 |     |     |     |       10 samples, micro-batches of 2, grid of 4
    | rank 0    | rank 1    |             | rank 0    | rank 1    |       2 ranks

Every rank, and every one of its loader workers, reads the whole stream and keeps its own samples. So all see the same end, and
a step consists of the same samples at any world size. Split "by shards", each rank reads shards of its own, which is faster,
but what is in a step then depends on the world size.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from allstep.data.grid import MicroBatch, no_step_remains
from allstep.errors import DataError

__all__ = ["Places", "Split", "StreamGrid", "choose_split", "is_stream", "length_of", "shards_of", "steps_of"]


def is_stream(dataset: Any) -> bool:
    """Whether `dataset` can only be read from its beginning: an IterableDataset, or what has `__iter__` and no items by number.

    Neither an iterator, which ends with the first epoch, nor a set, whose order may differ between ranks.

    A Hugging Face stream has `__getitem__`, for its columns, but no `__len__`.
    """
    if isinstance(dataset, IterableDataset):
        return True
    if isinstance(dataset, (Iterator, Set)):
        return False
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


def length_of(stream: Any) -> int | None:
    """`len(stream)`; None where it has none."""
    if not hasattr(stream, "__len__"):
        return None
    try:
        return len(stream)
    except (TypeError, NotImplementedError):  # a wrapper around something without a length
        return None


def shards_of(stream: Any) -> int | None:
    """Number of shards that `stream.shard(num_shards=, index=)` can deal out; None where it has no such method or number."""
    number = getattr(stream, "num_shards", getattr(stream, "n_shards", None))
    return number if hasattr(stream, "shard") and isinstance(number, int) else None


@dataclass(frozen=True)
class Split:
    """How a stream is split among ranks, and why so."""

    by_shards: bool
    """Each rank reads shards of its own; else all read everything and keep their own samples."""
    reason: str
    """One clause for a person."""


def choose_split(wanted: str, shards: int | None, ranks: int) -> Split:
    """How a stream of `shards` shards (None: it has none) is split among `ranks` where `wanted` is "samples" or "shards"."""
    if wanted == "samples":
        alone = "one rank, which reads all of it" if ranks == 1 else f"each of {ranks} ranks reads all of it and keeps its own"
        return Split(False, f"by samples: {alone}")
    if shards is None:
        return Split(False, "by samples, not by shards: it has no shard() with num_shards")
    if shards < ranks:
        return Split(False, f"by samples, not by shards: {shards} shard(s) do not give each of {ranks} ranks one")
    each, more = divmod(shards, ranks)
    if not more:
        return Split(True, f"by shards: {shards} over {ranks} ranks, {each} each")
    return Split(
        True,
        f"by shards: {shards} over {ranks} ranks, which does not divide: {each + 1} on {more} of them, {each} on the others; "
        f"a rank whose shards end first takes part with weight zero",
    )


def steps_of(lengths: Sequence[int | None], step_size: int, drop_last: bool) -> int | None:
    """Optimizer steps of an epoch over parts of `lengths` samples, each giving `step_size` to a step; None where unknown."""
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    return min(known) // step_size if drop_last else -(-max(known) // step_size)


@dataclass(frozen=True, kw_only=True)
class StreamGrid:
    """How a stream is laid out over steps, micro-batches and ranks; what `Grid` is for map-style data.

    Raises:
        DataError: a length of 0, or `drop_last` with fewer samples than one global batch.
    """

    split: Split
    samples: int | None
    """Length of the stream; None where it has none."""
    micro_batch_size: int
    """Samples of a full micro-batch."""
    micro_batches_per_step: int
    """Places in the grid of one step: ranks times accumulation."""
    drop_last: bool = False
    """Leave out the samples of an epoch that do not fill a whole grid."""
    steps_per_epoch: int | None = None
    """Optimizer steps of one epoch, as far as lengths tell; None where they do not. An epoch ends where the stream does."""

    def __post_init__(self) -> None:
        if self.samples == 0:
            raise DataError("The training stream is empty: len() is 0. Expected at least one sample.")
        if self.steps_per_epoch == 0:
            raise no_step_remains("stream", self.samples, self.micro_batches_per_step, self.micro_batch_size)

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step, on all ranks."""
        return self.micro_batch_size * self.micro_batches_per_step

    def samples_before(self, step: int) -> int:
        """Samples that the steps before `step` of an epoch consume; the last one counts in full where no length is known."""
        consumed = step * self.global_batch_size
        return consumed if self.samples is None else min(consumed, self.samples)

    def epoch_after(self, epoch: int, step: int, max_steps: int) -> float:
        """Passes over the data, in fractions, after `step` optimizer steps of `epoch`.

        Without a length a pass counts as `max_steps` steps until its end is found, as in Hugging Face's Trainer.
        """
        return epoch + min(1.0, step / (self.steps_per_epoch or max_steps))

    def places(self, rank: int, size: int) -> "Places":
        """What `rank` of `size` runs."""
        assert self.micro_batches_per_step % size == 0
        count, split = self.micro_batches_per_step // size, self.split.by_shards
        block = count * self.micro_batch_size
        return Places(
            micro_batch_size=self.micro_batch_size,
            first=rank * count,
            count=count,
            step_size=block if split else self.global_batch_size,
            offset=0 if split else rank * block,
            stride=size if split else 1,
            shift=rank if split else 0,
        )


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places of the grid that one rank runs, in the order of what this rank reads: the stream, or its own shards of it."""

    micro_batch_size: int
    first: int
    """Number of its first place in the grid."""
    count: int
    """Places in each step."""
    step_size: int
    """Samples by which a step moves on in what is read."""
    offset: int
    """Where in those its own begin."""
    stride: int = 1
    """Sample i of what is read has the id i * stride + shift: unique over ranks, and over ranks' shards."""
    shift: int = 0

    def place(self, epoch: int, step: int, number: int) -> MicroBatch:
        """The full micro-batch at the `number`-th of its places; `start` and `stop` count what is read."""
        start = step * self.step_size + self.offset + number * self.micro_batch_size
        return MicroBatch(epoch, step, self.first + number, start, start + self.micro_batch_size)

    def window(self, epoch: int, step: int) -> list[MicroBatch]:
        """All its places in a step; some are empty where the stream ends."""
        return [self.place(epoch, step, number) for number in range(self.count)]

    def worker(self, step: int, number: int, workers: int) -> int:
        """Which of `workers` prepares a place: they take turns."""
        return (step * self.count + number) % workers

    def sample_id(self, position: int) -> int:
        """The id of the sample at `position` of what is read."""
        return position * self.stride + self.shift

    def sample_ids(self, micro_batch: MicroBatch) -> list[int]:
        """Ids of the samples of a micro-batch: places in the stream's order, where it is split by samples."""
        return [self.sample_id(position) for position in range(micro_batch.start, micro_batch.stop)]
