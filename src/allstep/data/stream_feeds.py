"""Training on a stream: its steps, its end, on which all ranks agree, and where to go on after a stop."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from allstep.comm.communicator import Communicator
from allstep.data.feeds import TrainingFeeds
from allstep.data.grid import MicroBatch
from allstep.data.loader import Feed
from allstep.data.position import DataPosition
from allstep.data.stream_loader import Began, Ended, Item, StreamSource, open_source
from allstep.data.stream_reader import SavedStream, keeps_state
from allstep.data.streams import StreamGrid
from allstep.errors import CheckpointError, DataError

__all__ = ["StreamFeeds"]


class StreamFeeds(TrainingFeeds):
    """Micro-batches of a stream, for training.

    Split by samples, all ranks read the same and find the end at the same step, without a word. Split by shards, they ask each
    other at each step whether anyone has samples left; who has none takes part with empty places.

    Args:
        source: what this rank reads.
        grid: how it is laid out.
        communicator: the ranks.
        say: shows a line to whoever watches; called on rank 0.
    """

    def __init__(self, source: StreamSource, grid: StreamGrid, communicator: Communicator, say: Callable[[str], None]) -> None:
        self._source, self._grid, self._communicator = source, grid, communicator
        self._say: Callable[[str], None] = say if communicator.rank == 0 else lambda line: None
        self._places, self._workers = source.places, max(1, source.options.num_workers)
        self._items: list[Iterator[Item]] = []  # of each loader worker
        self._held: Item | Exception | None = None  # the first item of the coming step, or the end of this rank's shards
        self._held_from = 0  # the worker that gave it
        self._first = ""  # fingerprint of the stream's first sample
        self._compared = False  # with those of the other ranks
        self._number = 0  # micro-batches of this step that were fetched
        self._sure = (-1, -1)  # epoch and step that are there, on some rank
        self._at = (0, 0)  # epoch, and samples of it that are done when that step is
        self._left = 0  # steps until the end of the run
        self._saved: dict[str, Any] = {}  # what was loaded, until `begin`
        self._given: dict[int, Feed] = {}  # the window at hand, as nobody could read it again

    # ---- what the loop asks for

    def begin(self, position: DataPosition, steps: int) -> None:
        done = position.step * self._places.step_size
        saved = self._saved_at(position.epoch, done)
        if done and saved is None:
            self._say(f"skipping {done:,} samples of the training stream, by reading them")
        self._source.start, self._source.steps, self._source.saved = position, steps, saved
        self._items = open_source(self._source) if steps else []
        self._held, self._sure, self._at, self._left = None, (-1, -1), (position.epoch, done), steps
        self._saved = {}

    def has_step(self, epoch: int, step: int) -> bool:
        if (epoch, step) == self._sure:
            return True
        if not self._left:
            return False
        if self._held is None:
            self._held = self._pull(self._places.worker(step, 0, self._workers))
        self._compare_first_samples()
        mine = not isinstance(self._held, Ended)
        there = mine
        if self._grid.split.by_shards:
            of_ranks = self._communicator.all_gather_object(mine)
            there = all(of_ranks) if self._grid.drop_last else any(of_ranks)
        if there:
            self._sure, self._number = (epoch, step), 0
            self._at = (epoch, (step + 1) * self._places.step_size)
            self._left -= 1
        else:
            self._end_epoch(epoch, step)
        return there

    def window(self, epoch: int, step: int) -> list[MicroBatch]:
        self._given.clear()
        return self._places.window(epoch, step)

    def fetch(self) -> Feed:
        (epoch, step), number = self._sure, self._number
        self._number += 1
        if isinstance(self._held, Ended):
            place = self._places.place(epoch, step, number)
            return Feed(place._replace(stop=place.start), [], None)
        held, self._held = self._held, None
        item = self._pull(self._places.worker(step, number, self._workers)) if held is None else held
        if isinstance(item, Exception):
            raise item
        assert isinstance(item, Feed)
        self._given[item.micro_batch.number] = item
        return item

    def again(self, micro_batch: MicroBatch) -> Feed:
        return self._given[micro_batch.number]

    def close(self) -> None:
        self._items, self._source.reader = [], None  # which ends what the stream keeps running, such as threads

    def advanced(self, position: DataPosition) -> DataPosition:
        return DataPosition(epoch=position.epoch, step=position.step + 1)

    def epoch_at(self, epoch: int, step: int, max_steps: int) -> float:
        return self._grid.epoch_after(epoch, step, max_steps)

    def sample_ids(self, micro_batch: MicroBatch) -> list[int]:
        return self._places.sample_ids(micro_batch)

    # ---- reading

    def _pull(self, worker: int) -> Item | Exception:
        """The next of what `worker` read. An error is handed out by `fetch`, from where the other ranks are told of it."""
        self._held_from = worker
        try:
            item = next(self._items[worker])
            if isinstance(item, Began):
                self._note(item, worker)
                item = next(self._items[worker])
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks have to hear of it
            return error
        return item

    def _note(self, began: Began, worker: int) -> None:
        self._first = self._first or began.first
        if began.state_failed and worker == 0:
            self._say(
                f"skipped {self._source.start.step * self._places.step_size:,} samples of the training stream by reading "
                f"them: the state of {type(self._source.dataset).__name__} led to another sample than the run would have read"
            )

    def _compare_first_samples(self) -> None:
        """Collective, once. Ranks that read different streams would each keep a part of what only they have read."""
        if self._compared or self._grid.split.by_shards:
            return
        self._compared = True
        first = self._communicator.all_gather_object(self._first)
        others = [str(rank) for rank, each in enumerate(first) if each and first[0] and each != first[0]]
        if others and self._communicator.rank == 0:
            warnings.warn(
                f"The training stream begins with another sample on rank(s) {', '.join(others)} than on rank 0. Each rank "
                f"reads the whole stream and keeps its own samples of it, so a stream that is already divided among ranks "
                f"loses most of them. Give every rank the whole stream, in the same order.",
                stacklevel=5,
            )

    def _end_epoch(self, epoch: int, step: int) -> None:
        if step == 0:
            filling = f" that fill a global batch of {self._grid.global_batch_size}" if self._grid.drop_last else ""
            again = ", after an epoch that had some: its __iter__ has to begin anew for each epoch" if epoch else ""
            raise DataError(
                f"The training stream {type(self._source.dataset).__name__} gave no samples{filling} in epoch {epoch}{again}. "
                f"Expected at least one."
            )
        self._at = (epoch + 1, 0)
        if not isinstance(self._held, Ended):  # other ranks cannot fill a step: what is left here is dropped
            self.begin(DataPosition(epoch=epoch + 1), self._left)
            return
        for worker in {*range(self._workers)} - {self._held_from}:
            self._pull(worker)  # where it ends, too
        samples, self._held = self._held.samples, None
        promised = None if self._grid.split.by_shards or self._communicator.rank or epoch else self._grid.samples
        if promised not in (None, samples):
            warnings.warn(
                f"The training stream gave {samples} samples, but its len() is {promised}. An epoch ends where the stream "
                f"does; steps and schedule were planned for {promised}.",
                stacklevel=4,
            )

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Where the next step begins, and the dataset's own state there, if it has one and nobody has read ahead."""
        epoch, samples = self._at
        saved = None
        may = samples and not self._source.options.num_workers and not self._grid.split.by_shards and self._held is None
        if may and keeps_state(self._source.dataset) and self._source.reader is not None:
            saved = self._source.reader.saved_at(samples)
        return {
            "epoch": epoch,
            "samples": samples,
            "by_shards": self._grid.split.by_shards,
            "world_size": self._communicator.size,
            "dataset": None if saved is None else saved.state,
            "next_sample": None if saved is None else saved.next_sample,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there with the next `begin`; a state of another place is of no use, and passed over."""
        self._saved = state_dict

    def _saved_at(self, epoch: int, samples: int) -> SavedStream | None:
        """What was loaded, if it is the dataset's state at that place.

        Raises:
            CheckpointError: the run stands within shards that other ranks had.
        """
        saved = self._saved
        if not saved or not samples:
            return None
        ours, size = self._grid.split.by_shards, self._communicator.size
        if (ours or saved["by_shards"]) and (saved["by_shards"], saved["world_size"]) != (ours, size):
            raise CheckpointError(
                f"The checkpoint stands within an epoch of a stream split {_split(saved['by_shards'], saved['world_size'])}; "
                f"this run splits it {_split(ours, size)}, where no place has the same samples before it. Resume as it was "
                f"split, or from a checkpoint at the end of an epoch; dataloader_split_streams='samples' can always move."
            )
        is_here = (saved["epoch"], saved["samples"]) == (epoch, samples)
        if saved["dataset"] is None or not is_here or not keeps_state(self._source.dataset):
            return None
        return SavedStream(epoch, samples, saved["dataset"], saved["next_sample"])


def _split(by_shards: bool, ranks: int) -> str:
    return f"by shards over {ranks} rank(s)" if by_shards else "by samples"
