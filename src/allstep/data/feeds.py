"""What the training loop draws its micro-batches from, the same for map-style data and streams."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from allstep.data.grid import Grid, MicroBatch, Pick, training_picks
from allstep.data.loader import Feed, MicroBatchLoader
from allstep.data.order import Order
from allstep.data.position import DataPosition

__all__ = ["MapFeeds", "TrainingFeeds"]


class TrainingFeeds(ABC):
    """Micro-batches of one rank, in order. Calls: `begin`; then for each step `has_step`, `window`, `next` for each of it."""

    samples: int = 0
    """Samples that this rank was given since the start."""

    @abstractmethod
    def begin(self, position: DataPosition, steps: int) -> None:
        """Go to `position`; at most `steps` optimizer steps will be asked for."""

    @abstractmethod
    def has_step(self, epoch: int, step: int) -> bool:
        """Collective. Whether the epoch has that step, the same on all ranks; asked in order, once for each step.

        Raises:
            DataError: on every rank; the epoch has no step at all.
        """

    @abstractmethod
    def window(self, epoch: int, step: int) -> list[MicroBatch]:
        """The places that this rank runs; the feed of one may be smaller or empty, where nobody knew of the end."""

    @abstractmethod
    def close(self) -> None:
        """Let go of loader workers."""

    @abstractmethod
    def advanced(self, position: DataPosition) -> DataPosition:
        """The position one step on, as far as it is known."""

    @abstractmethod
    def epoch_at(self, epoch: int, step: int, max_steps: int) -> float:
        """Passes over the data, in fractions, after `step` optimizer steps of `epoch`."""

    @abstractmethod
    def sample_ids(self, micro_batch: MicroBatch) -> list[int]:
        """Ids of the samples at a place."""

    @abstractmethod
    def again(self, micro_batch: MicroBatch) -> Feed:
        """A micro-batch of the last window, which was fetched before; the same samples, and the same noise in them."""

    @abstractmethod
    def fetch(self) -> Feed:
        """The next micro-batch."""

    def __iter__(self) -> Iterator[Feed]:
        return self

    def __next__(self) -> Feed:
        feed = self.fetch()
        self.samples += len(feed.sample_ids)
        return feed


class MapFeeds(TrainingFeeds):
    """Micro-batches of map-style data; loader workers go on fetching over the ends of epochs.

    Args:
        loader: fetches them.
        grid: how they are laid out.
        rank: whose they are.
        size: the world size.
        order: of the samples.
    """

    def __init__(self, loader: MicroBatchLoader, grid: Grid, rank: int, size: int, order: Order) -> None:
        self._loader, self._grid, self._rank, self._size, self._order = loader, grid, rank, size, order
        self._feeds: Iterator[Feed] = iter(())

    def begin(self, position: DataPosition, steps: int) -> None:
        self._feeds = self._loader.feeds(training_picks(self._grid, position, steps, self._rank, self._size, self._order))

    def has_step(self, epoch: int, step: int) -> bool:
        return step < self._grid.steps_per_epoch

    def window(self, epoch: int, step: int) -> list[MicroBatch]:
        return self._grid.window(epoch, step, self._rank, self._size)

    def close(self) -> None:
        self._feeds = iter(())

    def advanced(self, position: DataPosition) -> DataPosition:
        return position.advanced(self._grid.steps_per_epoch)

    def epoch_at(self, epoch: int, step: int, max_steps: int) -> float:
        return epoch + step / self._grid.steps_per_epoch

    def sample_ids(self, micro_batch: MicroBatch) -> list[int]:
        return self._order.take(micro_batch.epoch, micro_batch.start, micro_batch.stop)

    def again(self, micro_batch: MicroBatch) -> Feed:
        return self._loader.fetch(Pick(micro_batch, self.sample_ids(micro_batch)))

    def fetch(self) -> Feed:
        return next(self._feeds)
