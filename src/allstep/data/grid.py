"""Which samples make up which step, and which rank runs them. Pure: numbers in, numbers out.

The samples of an epoch, in their order (`order.py`), are cut into micro-batches; `micro_batches_per_step` of them are the grid
of one optimizer step, and rank r of N runs the r-th contiguous block of the grid:

    step 0                                step 1
    | 0 1 | 2 3 | 4 5 | 6 7 |             | 8 9 |     |     |     |       10 samples, micro-batches of 2, grid of 4
    | rank 0    | rank 1    |             | rank 0    | rank 1    |       2 ranks

What a step consists of depends on seed, epoch and global batch only, never on the number of ranks. Where samples run out,
places of the grid stay empty: no sample is repeated or dropped to make counts even.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from allstep.data.order import Order, SequentialOrder
from allstep.data.position import DataPosition
from allstep.errors import DataError

__all__ = ["Grid", "MicroBatch", "Pick", "evaluation_batches", "evaluation_picks", "no_step_remains", "training_picks"]


class MicroBatch(NamedTuple):
    """A place of the grid: the samples of one forward."""

    epoch: int
    step: int
    """Optimizer step within the epoch."""
    number: int
    """Place in the grid of its step, 0 to micro_batches_per_step - 1."""
    start: int
    """Its samples are those from `start` to `stop` in the epoch's order."""
    stop: int

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How the samples of an epoch are laid out over steps, micro-batches and ranks.

    Raises:
        DataError: no samples, or `drop_last` with fewer samples than one global batch.
    """

    samples: int
    """Samples in the dataset."""
    micro_batch_size: int
    """Samples of a full micro-batch."""
    micro_batches_per_step: int
    """Places in the grid of one step: ranks times accumulation."""
    drop_last: bool = False
    """Leave out the samples of an epoch that do not fill a whole grid."""

    def __post_init__(self) -> None:
        if self.samples <= 0:
            raise DataError("The training dataset is empty: len() is 0. Expected at least one sample.")
        if self.drop_last and self.samples < self.global_batch_size:
            raise no_step_remains("dataset", self.samples, self.micro_batches_per_step, self.micro_batch_size)

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step, on all ranks."""
        return self.micro_batch_size * self.micro_batches_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch; the last one may be ragged."""
        full, rest = divmod(self.samples, self.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def samples_before(self, step: int) -> int:
        """Samples that the steps before `step` of an epoch consume."""
        return min(step * self.global_batch_size, self.samples)

    def window(self, epoch: int, step: int, rank: int, size: int) -> list[MicroBatch]:
        """The micro-batches that `rank` of `size` runs in one optimizer step, without empty ones; it may be none."""
        assert self.micro_batches_per_step % size == 0
        block = self.micro_batches_per_step // size
        return [
            micro_batch
            for number in range(rank * block, (rank + 1) * block)
            if (micro_batch := self.micro_batch(epoch, step, number)).size
        ]

    def micro_batch(self, epoch: int, step: int, number: int) -> MicroBatch:
        """One place of the grid; beyond the last sample it is empty."""
        start = min(self.samples, step * self.global_batch_size + number * self.micro_batch_size)
        stop = min(self.samples, start + self.micro_batch_size)
        return MicroBatch(epoch=epoch, step=step, number=number, start=start, stop=stop)


def no_step_remains(what: str, samples: int | None, micro_batches: int, micro_batch_size: int) -> DataError:
    """The error of `dataloader_drop_last` where `samples` fill no step of so many micro-batches."""
    return DataError(
        f"The training {what} has {samples} samples, fewer than one global batch of {micro_batches * micro_batch_size} "
        f"({micro_batches} micro-batches of {micro_batch_size}), and dataloader_drop_last=True drops what does not fill one: "
        f"no step would remain. Set dataloader_drop_last=False, or make the global batch smaller."
    )


class Pick(NamedTuple):
    """A micro-batch and the samples in it."""

    micro_batch: MicroBatch
    sample_ids: list[int]
    """Indices into the dataset."""


def training_picks(grid: Grid, position: DataPosition, steps: int, rank: int, size: int, order: Order) -> Iterator[Pick]:
    """What `rank` of `size` runs in `steps` optimizer steps from `position` on, in order, over as many epochs as it takes."""
    for _ in range(steps):
        for micro_batch in grid.window(position.epoch, position.step, rank, size):
            yield Pick(micro_batch, order.take(position.epoch, micro_batch.start, micro_batch.stop))
        position = position.advanced(grid.steps_per_epoch)


def evaluation_batches(samples: int, batch_size: int, *, drop_last: bool = False) -> int:
    """Batches of an evaluation, on all ranks."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def evaluation_picks(
    samples: int, batch_size: int, rank: int, size: int, order: Order | None = None, *, drop_last: bool = False
) -> Iterator[Pick]:
    """What `rank` of `size` evaluates: a contiguous block of batches, so that ranks in order give the dataset's order.

    `order` is another order than the dataset's; `drop_last` leaves out what fills no batch.
    """
    order = SequentialOrder(samples) if order is None else order
    batches = evaluation_batches(samples, batch_size, drop_last=drop_last)
    for number in range(batches * rank // size, batches * (rank + 1) // size):
        start, stop = number * batch_size, min(samples, (number + 1) * batch_size)
        place = MicroBatch(epoch=0, step=0, number=number, start=start, stop=stop)
        yield Pick(place, order.take(0, start, stop))
