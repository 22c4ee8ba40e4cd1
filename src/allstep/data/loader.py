"""Micro-batches of this rank, in order, from a map-style dataset."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from allstep.comm.forking import forking_workers, keep_what_was_here
from allstep.data.collate import collate, select_columns
from allstep.data.grid import MicroBatch, Pick, evaluation_picks
from allstep.data.order import Order
from allstep.data.seeding import mixed, seed_generators
from allstep.errors import DataError

__all__ = ["Feed", "LoaderOptions", "MicroBatchLoader", "check_map_style"]


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How samples are fetched; nothing here changes which."""

    collator: Callable[[list[Any]], Any] = collate
    columns: frozenset[str] | None = None
    """Names that the model takes; None keeps all."""
    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    """Micro-batches that each worker fetches ahead."""
    multiprocessing_context: Any = None
    """How workers are started: "fork", "spawn", "forkserver", or a context; None: as Python does."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each worker with its number."""

    @property
    def start_worker(self) -> Callable[[int], None]:
        """What a DataLoader is to call in each worker first."""
        return keep_what_was_here if self.worker_init_fn is None else _Start(self.worker_init_fn)


class _Start:
    def __init__(self, of_user: Callable[[int], None]) -> None:
        self._of_user = of_user

    def __call__(self, worker: int) -> None:
        keep_what_was_here(worker)
        self._of_user(worker)


class Feed(NamedTuple):
    """A micro-batch and what fetching it gave."""

    micro_batch: MicroBatch
    sample_ids: list[int]
    """Indices of its samples in the dataset."""
    inputs: Any
    """What the collator made of them."""


class MicroBatchLoader:
    """Fetches micro-batches from `dataset`.

    Args:
        dataset: has `__len__` and `__getitem__`; `__getitems__` is used where it is there.
        seed: of what is random in the dataset.
        options: how samples are fetched.

    Raises:
        DataError: `dataset` is not map-style.
    """

    def __init__(self, dataset: Any, seed: int, options: LoaderOptions) -> None:
        check_map_style(dataset)
        self._dataset, self._collate = _SeededDataset(dataset, options.columns, seed), _Collator(options.collator)
        self._picks, self._samples = _Picks(), len(dataset)
        self._loader: DataLoader[Feed] = DataLoader(
            self._dataset,
            batch_sampler=self._picks,  # type: ignore[arg-type]  # torch only iterates over it
            collate_fn=self._collate,  # type: ignore[arg-type]  # __getitems__ gives it more than a list
            num_workers=options.num_workers,
            pin_memory=options.pin_memory,
            persistent_workers=options.persistent_workers and options.num_workers > 0,
            prefetch_factor=options.prefetch_factor if options.num_workers else None,
            generator=torch.Generator(),  # of its own, so that fetching never moves the global one
            multiprocessing_context=options.multiprocessing_context if options.num_workers else None,
            worker_init_fn=options.start_worker,
        )

    def feeds(self, picks: Iterable[Pick]) -> Iterator[Feed]:
        """Fetch `picks`, in order; loader workers, where there are some, fetch ahead."""
        if not self._loader.num_workers and not self._loader.pin_memory:
            return (self._collate(self._dataset.__getitems__(pick)) for pick in picks)
        self._picks.current = picks
        if not self._loader.num_workers:
            return iter(self._loader)
        with forking_workers():
            return iter(self._loader)

    def fetch(self, pick: Pick) -> Feed:
        """Fetch one micro-batch in this process, beside what `feeds` is at."""
        return self._collate(self._dataset.__getitems__(pick))

    def evaluation(
        self,
        batch_size: int,
        rank: int,
        size: int,
        *,
        in_turns: bool = False,
        order: Order | None = None,
        drop_last: bool = False,
    ) -> Iterator[Feed]:
        """The batches that `rank` of `size` evaluates: a block of them, or each `size`-th where ranks take turns.

        They follow the dataset, or `order`; `drop_last` leaves out what fills no batch.
        """
        samples = self._samples if order is None else len(order)
        if in_turns:
            everyone = evaluation_picks(samples, batch_size, 0, 1, order, drop_last=drop_last)
            return self.feeds(islice(everyone, rank, None, size))
        return self.feeds(evaluation_picks(samples, batch_size, rank, size, order, drop_last=drop_last))


class _Picks:
    """The batch sampler: hands out what is to be fetched now."""

    current: Iterable[Pick] = ()

    def __iter__(self) -> Iterator[Pick]:
        return iter(self.current)


class _SeededDataset(Dataset[Any]):
    """Fetches samples with every generator seeded by (seed, epoch, index), in whatever process it runs."""

    def __init__(self, dataset: Any, columns: frozenset[str] | None, seed: int) -> None:
        self._dataset, self._columns, self._seed = dataset, columns, seed

    def __getitems__(self, pick: Pick) -> tuple[Pick, list[Any]]:
        epoch = pick.micro_batch.epoch
        if hasattr(self._dataset, "__getitems__"):
            seed_generators(mixed(self._seed, epoch, *pick.sample_ids))
            samples = self._dataset.__getitems__(pick.sample_ids)
        elif type(self._dataset) in (list, tuple):
            # Nothing is drawn there. What the collator draws comes after the last sample, as it does elsewhere.
            samples = [self._dataset[index] for index in pick.sample_ids[:-1]]
            samples += [self._fetch(epoch, index) for index in pick.sample_ids[-1:]]
        else:
            samples = [self._fetch(epoch, index) for index in pick.sample_ids]
        if self._columns is not None:
            samples = [select_columns(sample, self._columns) for sample in samples]
        return pick, samples

    def _fetch(self, epoch: int, index: int) -> Any:
        seed_generators(mixed(self._seed, epoch, index))
        return self._dataset[index]


class _Collator:
    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self._collator = collator

    def __call__(self, fetched: tuple[Pick, list[Any]]) -> Feed:
        pick, samples = fetched
        return Feed(pick.micro_batch, pick.sample_ids, self._collator(samples))


def check_map_style(dataset: Any) -> None:
    """Refuse what has no length or no items.

    Raises:
        DataError: `dataset` is a stream, or lacks `__len__` or `__getitem__`.
    """
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{type(dataset).__name__} is an IterableDataset, which has no samples by number. Expected a dataset with __len__ "
            f"and __getitem__; streams are read by a StreamLoader."
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise DataError(f"{type(dataset).__name__} has no {' and no '.join(missing)}: expected a map-style dataset, or a list.")
