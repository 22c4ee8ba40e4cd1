"""torch DataLoaders: what one says, and one that people can iterate over on each rank.

The Trainer does not iterate over a DataLoader, which cannot go to a place and does not know of ranks; it reads from it which
samples there are, in which order, and how they are put together (`source_of`), and fetches them itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from allstep.data.collate import to_device
from allstep.data.grid import MicroBatch, Pick
from allstep.data.loader import LoaderOptions, MicroBatchLoader
from allstep.data.order import Order, order_of
from allstep.data.stream_loader import StreamLoader
from allstep.data.streams import is_stream, length_of

__all__ = ["RankDataLoader", "Source", "source_of"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Which samples, in which order, put together how."""

    dataset: Any
    order: Order | None
    """Of the places in an epoch; None for a stream, which has its own."""
    batch_size: int
    """Places of a micro-batch: samples, or 1 where what lies at a place is a whole batch."""
    drop_last: bool
    options: LoaderOptions
    gives_batches: bool = False
    """What lies at a place of a stream is a batch, of which only its tensors tell how many samples it has."""

    @property
    def samples(self) -> int | None:
        """Places in an epoch, or items of a stream, where it tells."""
        return length_of(self.dataset) if self.order is None else len(self.order)

    def loader(self, seed: int) -> MicroBatchLoader | StreamLoader:
        """What fetches its micro-batches; `seed` is of what is random in the dataset."""
        kind = StreamLoader if self.order is None else MicroBatchLoader
        return kind(self.dataset, seed, self.options)


def source_of(loader: Any, seed: int, *, pins: bool) -> Source:
    """What `loader` says: a torch DataLoader, or anything that gives a batch at a time.

    Of a DataLoader with a sampler for one rank (DistributedSampler) it is what all ranks together have.

    Args:
        loader: a DataLoader, or an iterable of ready batches, such as another library's loader.
        seed: of an order that the loader leaves open.
        pins: whether memory can be pinned.
    """
    if not isinstance(loader, DataLoader):
        one = LoaderOptions(collator=_first)
        return Source(dataset=_Batches(loader), order=None, batch_size=1, drop_last=False, options=one, gives_batches=True)
    batched = loader.batch_size is not None
    own = loader.collate_fn
    options = LoaderOptions(
        collator=own,
        columns=getattr(loader, "columns", None),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory and pins,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
    )
    dataset = loader.dataset
    if is_stream(dataset):
        if not batched:
            options = dataclasses.replace(options, collator=functools.partial(_of_one, own))
        size, drops = loader.batch_size or 1, bool(loader.drop_last)
        return Source(dataset=dataset, order=None, batch_size=size, drop_last=drops, options=options, gives_batches=not batched)
    samples = len(dataset)  # type: ignore[arg-type]  # no stream, so it has a length
    if batched and type(loader.batch_sampler) is BatchSampler:
        assert loader.batch_size is not None
        order = order_of(loader.sampler, samples, seed)
        return Source(dataset=dataset, order=order, batch_size=loader.batch_size, drop_last=loader.drop_last, options=options)
    batches = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if loader.batch_sampler is None:  # the dataset gives batches
        options = dataclasses.replace(options, collator=functools.partial(_of_one, own))
    order = order_of(batches, samples, seed)
    gives_batches = loader.batch_sampler is None
    return Source(dataset=dataset, order=order, batch_size=1, drop_last=False, options=options, gives_batches=gives_batches)


class RankDataLoader(DataLoader[Any]):
    """A DataLoader that gives each rank its own batches, on its device; what the Trainer's `get_*_dataloader` return.

    In each round every rank has one batch, rank r of N the batches r, N + r, 2 N + r, …; so all have as many. Where samples
    run out in the last round of several ranks, it is filled up with those from the beginning, as `real_samples` tells: there
    `Accelerator.gather_for_metrics` cuts them off. A stream is not filled up: some ranks may have one batch less.
    (The Trainer itself repeats no sample.)

    Args:
        dataset: as a DataLoader's; and so are all others.
        columns: what the model takes of a sample; None for all.
        rank: this process.
        ranks: how many there are.
        device: where batches go.
        seed: of the order, where no sampler says it, and of what is random in the dataset.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        columns: frozenset[str] | None = None,
        rank: int,
        ranks: int,
        device: torch.device,
        seed: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.columns, self.device, self.rank, self.ranks, self.seed = columns, device, rank, ranks, seed
        self.real_samples: int | None = None
        """Samples of this round on all ranks, without those that fill it up; None in full rounds."""
        self._passes = 0

    @classmethod
    def of(cls, loader: "DataLoader[Any]", *, rank: int, ranks: int, device: torch.device, seed: int) -> "RankDataLoader":
        """The same for each rank as `loader` is for one."""
        if isinstance(loader, cls):
            return loader
        parts: dict[str, Any]
        if loader.batch_size is None and loader.batch_sampler is not None:
            parts = {"batch_sampler": loader.batch_sampler}
        else:  # batches are made by the loader, or by the dataset
            parts = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            parts |= {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
        names = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
        parts |= {name: getattr(loader, name) for name in (*names, "prefetch_factor", "persistent_workers")}
        return cls(loader.dataset, rank=rank, ranks=ranks, device=device, seed=seed, **parts)

    def __len__(self) -> int:
        source = source_of(self, self.seed, pins=False)
        if source.samples is None:
            return super().__len__()  # which raises
        batches = source.samples // source.batch_size if source.drop_last else -(-source.samples // source.batch_size)
        return batches // self.ranks if source.drop_last else -(-batches // self.ranks)

    def __iter__(self) -> Any:
        source = source_of(self, self.seed, pins=self.device.type != "cpu")
        loader = source.loader(self.seed)
        if isinstance(loader, StreamLoader):
            return (to_device(feed.inputs, self.device) for feed in loader.evaluation(source.batch_size, self.rank, self.ranks))
        assert source.order is not None
        epoch, self._passes = self._passes, self._passes + 1
        return self._rounds(source, loader, source.order, epoch)

    def _rounds(self, source: Source, loader: MicroBatchLoader, order: Order, epoch: int) -> Iterator[Any]:
        rounds, step = len(self), source.batch_size * self.ranks
        samples = min(len(order), rounds * step)
        picks = (self._pick(order, epoch, number, source.batch_size, samples) for number in range(rounds))
        try:
            for number, feed in enumerate(loader.feeds(picks)):
                is_full = (number + 1) * step <= samples
                self.real_samples = None if is_full else len(order.take(epoch, number * step, samples))
                yield to_device(feed.inputs, self.device)
        finally:  # also where the loop over it was left early
            self.real_samples = None

    def _pick(self, order: Order, epoch: int, number: int, size: int, samples: int) -> Pick:
        start = (number * self.ranks + self.rank) * size
        if self.ranks == 1:
            size = min(size, samples - start)
        ids: list[int] = []
        for place in range(start, start + size):  # one after the other, as those that fill up may begin anew
            at = place % samples
            ids += order.take(epoch, at, at + 1)
        return Pick(MicroBatch(epoch=epoch, step=number, number=self.rank, start=start, stop=start + size), ids)


class _Batches(IterableDataset[Any]):
    """Ready batches as a stream."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _first(items: list[Any]) -> Any:
    return items[0]


def _of_one(collate: Callable[[Any], Any], items: list[Any]) -> Any:
    return collate(items[0])
