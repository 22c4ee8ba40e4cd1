"""What a DataLoader says, read from it: samples, order, sizes, and how they are put together."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from allstep.data.dataloaders import RankDataLoader, source_of
from allstep.data.order import SampledOrder, SequentialOrder, ShuffledOrder
from allstep.data.stream_loader import StreamLoader

ROWS = list(range(10))


class Stream(IterableDataset):
    def __iter__(self):
        yield from ROWS


class WholeBatches(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.full((2,), index)


def fetched(loader, batch=None):
    """The inputs of what rank 0 of 1 would evaluate."""
    source = source_of(loader, 7, pins=False)
    fetcher = source.loader(0)
    if isinstance(fetcher, StreamLoader):
        return [feed.inputs.tolist() for feed in fetcher.evaluation(source.batch_size, 0, 1)]
    feeds = fetcher.evaluation(source.batch_size, 0, 1, order=source.order, drop_last=source.drop_last)
    return [feed.inputs.tolist() for feed in feeds]


@pytest.mark.parametrize(
    ("loader", "kind"),
    [
        (DataLoader(ROWS, 4), SequentialOrder),
        (DataLoader(ROWS, 4, shuffle=True), ShuffledOrder),
        (DataLoader(ROWS, 4, sampler=WeightedRandomSampler([1.0] * 10, 6)), SampledOrder),
        (DataLoader(ROWS, 4, sampler=RandomSampler(ROWS, replacement=True)), SampledOrder),
        (DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 4, drop_last=True)), SampledOrder),
        (DataLoader(Stream(), 4), type(None)),
    ],
)
def test_orders(loader, kind):
    assert type(source_of(loader, 7, pins=False).order) is kind


def test_batches():
    whole = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert fetched(DataLoader(ROWS, 4)) == whole
    assert fetched(DataLoader(ROWS, 4, drop_last=True)) == whole[:2]
    assert fetched(DataLoader(Stream(), 4)) == whole
    assert fetched(DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 4, drop_last=True))) == whole[:2]
    assert fetched(DataLoader(ROWS, batch_sampler=[[3, 1], [2]])) == [[3, 1], [2]]
    assert fetched(DataLoader(WholeBatches(), batch_size=None)) == [[0, 0], [1, 1], [2, 2]]
    assert fetched([torch.tensor([1, 2]), torch.tensor([3])]) == [[1, 2], [3]]


def test_settings_are_taken_over():
    def collate(rows):
        return torch.tensor(rows) * 2

    def begin(worker):
        pass

    loader = DataLoader(ROWS, 3, collate_fn=collate, num_workers=2, prefetch_factor=5, worker_init_fn=begin, pin_memory=True)
    options = source_of(loader, 7, pins=False).options
    assert (options.collator, options.num_workers, options.prefetch_factor) == (collate, 2, 5)
    assert (options.worker_init_fn, options.pin_memory) == (begin, False)
    assert source_of(loader, 7, pins=True).options.pin_memory
    assert fetched(DataLoader(ROWS, 5, collate_fn=collate)) == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]


def of(loader, rank=0, ranks=1):
    return RankDataLoader.of(loader, rank=rank, ranks=ranks, device=torch.device("cpu"), seed=7)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_have_as_many_batches_and_one_knows_what_is_real(ranks, drop_last):
    loaders = [of(DataLoader(ROWS, 2, drop_last=drop_last), rank, ranks) for rank in range(ranks)]
    assert len({len(loader) for loader in loaders}) == 1
    seen = []
    for batches in zip(*loaders, strict=True):
        rows = [row for batch in batches for row in batch.tolist()]
        assert len({loader.real_samples for loader in loaders}) == 1
        seen += rows[: loaders[0].real_samples]
    assert seen == (ROWS[: 10 // (2 * ranks) * 2 * ranks] if drop_last else ROWS)


@pytest.mark.parametrize("loader", [DataLoader(ROWS[:5], 1), DataLoader(ROWS[:5], batch_sampler=[[0, 1], [2], [3, 4]])])
def test_batches_of_one_and_whole_batches_that_fill_up_a_round_are_told_too(loader):
    seen, loaders = [], [of(loader, rank, 2) for rank in range(2)]
    for batches in zip(*loaders, strict=True):
        seen += [row for batch in batches for row in batch.tolist()][: loaders[0].real_samples]
    assert seen == ROWS[:5]


def test_a_loop_that_is_left_early_leaves_no_cut_behind():
    loader = of(DataLoader(ROWS[:1], 2), 0, 2)
    batches = iter(loader)
    next(batches)
    assert loader.real_samples == 1
    batches.close()
    assert loader.real_samples is None


def test_a_loader_for_ranks_is_a_data_loader_with_the_same_parts():
    plain = DataLoader(ROWS, 4, shuffle=True, drop_last=True)
    shared = of(plain, 1, 2)
    assert isinstance(shared, DataLoader)
    assert (shared.dataset, shared.batch_size, shared.drop_last) == (ROWS, 4, True)
    assert of(shared) is shared
    first, second = ([batch.tolist() for batch in of(plain)] for _ in range(2))
    assert first == second, "a new one begins anew"
    with pytest.raises(TypeError):
        len(of(DataLoader(Stream(), 4)))
