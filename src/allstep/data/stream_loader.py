"""Micro-batches of this rank, in order, from a stream."""

import copy
import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from allstep.comm.communicator import Communicator
from allstep.comm.forking import forking_workers
from allstep.data.loader import Feed, LoaderOptions
from allstep.data.position import DataPosition
from allstep.data.seeding import mixed, seed_generators
from allstep.data.stream_reader import SavedStream, StreamReader
from allstep.data.streams import Places, Split, StreamGrid

__all__ = ["Began", "Ended", "Item", "StreamLoader", "StreamSource", "open_source"]


@dataclass(frozen=True)
class Began:
    """What a reader says first."""

    first: str
    """Fingerprint of the first sample of the stream; empty where it went on from a state, or there is none."""
    state_failed: bool
    """The state that it was to go on from led to another sample than it should."""


@dataclass(frozen=True)
class Ended:
    """What a reader says at the end of an epoch."""

    samples: int
    """Samples of the epoch, in all that was read."""


Item = Began | Feed | Ended


class StreamSource(IterableDataset[Item]):
    """What one loader worker of one rank, or the rank itself, makes of a stream: `Began`, then feeds and `Ended` of each epoch.

    Of each step it gives its own places, and empty feeds for those that the end of the stream left empty, so that a reader
    needs no other word on which steps there are.

    Args:
        dataset: the stream, or this rank's shards of it.
        seed: of what is random in the dataset and the collator.
        options: how samples are fetched.
        places: what this rank runs.
        drop_last: leave out a step that the stream does not fill.
        epochs: passes over it; None goes on until `steps` are done. Only then the dataset is told the epoch.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        options: LoaderOptions,
        places: Places,
        *,
        drop_last: bool = False,
        epochs: int | None = None,
    ) -> None:
        self.dataset, self.seed, self.options, self.places = dataset, seed, options, places
        self.drop_last, self.epochs = drop_last, epochs
        self.start, self.steps = DataPosition(), -1
        """Where it begins, and after how many steps it ends; -1: never."""
        self.saved: SavedStream | None = None
        """The dataset's state there."""
        self.worker, self.workers = 0, 1
        """Which places are its own: workers take turns."""
        self.shows_progress = False
        self.reader: StreamReader | None = None
        """What reads, in this process."""

    def __iter__(self) -> Iterator[Item]:
        reader = self.reader = StreamReader(self.dataset, self.seed, self.options.columns, self.places)
        first, left = self.start.step, self.steps
        for epoch in itertools.count(self.start.epoch):
            at_start = epoch == self.start.epoch
            saved = self.saved if at_start else None
            resumed = reader.open(epoch, tell_epoch=self.epochs is None, saved=saved)
            if at_start:
                if not resumed:
                    reader.skip_to(first * self.places.step_size, show=self.shows_progress and self.worker == 0)
                reader.has_more()
                yield Began(reader.first, saved is not None and not resumed)
            for step in itertools.count(first if at_start else 0):
                if left == 0:
                    return
                reader.skip_to(step * self.places.step_size)
                if not reader.has_more() or not (yield from self._step(reader, epoch, step)):
                    break
                left -= 1
            yield Ended(reader.position)
            if self.epochs is not None and epoch + 1 == self.epochs:
                return

    def _step(self, reader: StreamReader, epoch: int, step: int) -> Generator[Feed, None, bool]:
        """The feeds of a step, and whether there is one; with `drop_last`, there is none that the stream does not fill."""
        feeds = self._feeds(reader, epoch, step)
        if not self.drop_last:
            yield from feeds
            return True
        held, stop = list(feeds), (step + 1) * self.places.step_size
        reader.skip_to(stop)
        if reader.position < stop:
            return False
        yield from held
        return True

    def _feeds(self, reader: StreamReader, epoch: int, step: int) -> Iterator[Feed]:
        for number, place in enumerate(self.places.window(epoch, step)):
            if self.places.worker(step, number, self.workers) != self.worker:
                continue
            reader.skip_to(place.start)
            samples = reader.take(place.size)
            micro_batch = place._replace(stop=place.start + len(samples))
            # What the collator draws must not depend on who read ahead before it (test_streams.py, "the collator draws").
            seed_generators(mixed(self.seed, epoch, place.start, place.number))
            inputs = self.options.collator(samples) if samples else None
            yield Feed(micro_batch, self.places.sample_ids(micro_batch), inputs)


def open_source(source: StreamSource) -> list[Iterator[Item]]:
    """What each loader worker of `source` gives; what the rank itself gives, on demand, where there are none.

    Each worker is a DataLoader of its own, because torch's own turns end with the first epoch that does not divide.
    """
    options = source.options
    if not options.num_workers and not options.pin_memory:
        return [iter(source)]
    items: list[Iterator[Item]] = []
    for worker in range(max(1, options.num_workers)):
        part = copy.copy(source)
        if options.num_workers:
            part.worker, part.workers, part.reader = worker, options.num_workers, None
        else:
            part = source  # whose reader is asked for the dataset's state
        loader: DataLoader[Item] = DataLoader(
            part,
            batch_size=None,
            collate_fn=_as_it_is,  # or arrays would become tensors
            num_workers=1 if options.num_workers else 0,
            pin_memory=options.pin_memory,
            prefetch_factor=options.prefetch_factor if options.num_workers else None,
            generator=torch.Generator(),  # of its own, so that fetching never moves the global one
            multiprocessing_context=options.multiprocessing_context if options.num_workers else None,
            worker_init_fn=options.start_worker,
        )
        with forking_workers():
            items.append(iter(loader))
    return items


def _as_it_is(item: Any) -> Any:
    return item


class StreamLoader:
    """Fetches micro-batches of the stream `dataset`.

    Args:
        dataset: an IterableDataset, or whatever can be iterated over, anew for each epoch.
        seed: of what is random in the dataset.
        options: how samples are fetched; nothing there changes which.
    """

    def __init__(self, dataset: Any, seed: int, options: LoaderOptions) -> None:
        self.dataset, self._seed, self._options = dataset, seed, options

    def training(self, grid: StreamGrid, communicator: Communicator) -> StreamSource:
        """What this rank trains on: the whole stream, or its own shards of it."""
        dataset, rank, size = self.dataset, communicator.rank, communicator.size
        if grid.split.by_shards:
            dataset = dataset.shard(num_shards=size, index=rank)
        source = StreamSource(dataset, self._seed, self._options, grid.places(rank, size), drop_last=grid.drop_last)
        source.shows_progress = rank == 0
        return source

    def evaluation(self, batch_size: int, rank: int, size: int, *, in_turns: bool = True) -> Iterator[Feed]:
        """The batches that `rank` of `size` evaluates: each `size`-th, as ranks take turns, numbered in the stream's order."""
        whole = Split(False, "by samples")
        grid = StreamGrid(split=whole, samples=None, micro_batch_size=batch_size, micro_batches_per_step=size)
        source = StreamSource(self.dataset, self._seed, self._options, grid.places(rank, size), epochs=1)
        workers = open_source(source)
        for items in workers:
            next(items)  # which says that it began
        for items in itertools.cycle(workers):
            item = next(items)
            if not isinstance(item, Feed):
                return
            place = item.micro_batch
            if item.sample_ids:
                yield item._replace(micro_batch=place._replace(step=0, number=place.step * size + place.number))
