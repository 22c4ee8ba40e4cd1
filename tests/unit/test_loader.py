"""Micro-batches of a rank: what is fetched, with which randomness, in the rank itself or in loader workers."""

import random
import traceback

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from allstep.data.grid import Grid, MicroBatch, Pick, training_picks
from allstep.data.loader import LoaderOptions, MicroBatchLoader, check_map_style
from allstep.data.order import ShuffledOrder
from allstep.data.position import DataPosition
from allstep.errors import DataError


class Draws(Dataset):
    """Its rows are what the three generators give, and its index."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"index": index, "drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))]}


class Batched(Draws):
    """Fetches many at once; keeps what it was asked for."""

    def __init__(self):
        self.asked = []

    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [self[index] for index in indices]


class Refusing(Draws):
    def __getitem__(self, index):
        if index == 3:
            raise LookupError("row 3 is torn")
        return super().__getitem__(index)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


def picks(epochs=1, batch=3, start=0):
    grid = Grid(samples=10, micro_batch_size=batch, micro_batches_per_step=1)
    return training_picks(grid, DataPosition(epoch=start), epochs * grid.steps_per_epoch, 0, 1, ShuffledOrder(10, 7))


def fetch(dataset=None, seed=7, epochs=1, batch=3, start=0, **options):
    loader = MicroBatchLoader(dataset or Draws(), seed, LoaderOptions(**options))
    return list(loader.feeds(picks(epochs, batch, start)))


def drawn(feeds):
    """Index -> what was drawn for it."""
    rows = [row for feed in feeds for row in zip(feed.inputs["index"].tolist(), feed.inputs["drawn"].tolist(), strict=True)]
    return {index: tuple(draws) for index, draws in rows}


def test_every_feed_carries_its_micro_batch_its_indices_and_its_inputs():
    feeds = fetch(epochs=2)
    for feed, pick in zip(feeds, picks(epochs=2), strict=True):
        assert (feed.micro_batch, feed.sample_ids) == pick
        assert feed.inputs["index"].tolist() == feed.sample_ids


def test_worker_processes_fetch_the_same_in_the_same_order():
    alone, beside = fetch(epochs=2), fetch(epochs=2, num_workers=2)
    assert [feed[:2] for feed in alone] == [feed[:2] for feed in beside]
    for own, other in zip(alone, beside, strict=True):
        assert all(torch.equal(own.inputs[key], other.inputs[key]) for key in ("index", "drawn"))


def test_what_a_sample_draws_does_not_depend_on_the_micro_batch_around_it():
    assert drawn(fetch(batch=3)) == drawn(fetch(batch=1)) == drawn(fetch(batch=10))


def test_draws_differ_between_samples_epochs_seeds_and_libraries():
    values = [
        value
        for start in range(3)
        for seed in range(3)
        for draws in drawn(fetch(seed=seed, start=start)).values()
        for value in draws
    ]
    assert len(set(values)) == len(values) == 3 * 3 * 10 * 3


def test_the_same_seed_draws_the_same_again_wherever_the_generators_stood():
    first = drawn(fetch())
    torch.manual_seed(123)
    random.seed(4)
    assert drawn(fetch()) == first


def test_a_dataset_that_fetches_many_at_once_is_asked_once_a_micro_batch():
    dataset = Batched()
    feeds = fetch(dataset)
    assert dataset.asked == [feed.sample_ids for feed in feeds]
    again = fetch(Batched(), num_workers=2)
    assert drawn(again) == drawn(feeds)
    assert drawn(fetch(Batched(), start=1)) != drawn(feeds)


def test_columns_that_the_model_does_not_take_never_reach_the_collator():
    seen = []
    fetch(columns=frozenset({"index"}), collator=seen.extend)
    assert {key for sample in seen for key in sample} == {"index"}


def test_samples_without_names_are_left_whole():
    dataset = [(torch.tensor([float(index)]), index) for index in range(10)]
    feeds = fetch(dataset, columns=frozenset({"x"}))
    assert [tuple(part.shape) for part in feeds[0].inputs] == [(3, 1), (3,)]


def test_whatever_the_collator_makes_arrives():
    assert {feed.inputs for feed in fetch(collator=len)} == {3, 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_keeps_its_kind_and_its_words(workers):
    words = None
    try:
        fetch(Refusing(), num_workers=workers)
    except LookupError as error:
        words = str(error)
        # frames and error hold one another, and workers that the garbage collector ends take torch five seconds each
        traceback.clear_frames(error.__traceback__)
    assert words is not None
    assert "row 3 is torn" in words


@pytest.mark.parametrize("persistent", [False, True])
def test_feeds_can_be_asked_for_again_before_the_first_ones_are_used_up(persistent):
    loader = MicroBatchLoader(Draws(), 7, LoaderOptions(num_workers=2, persistent_workers=persistent))
    first = loader.feeds(picks(epochs=3))
    begun = [next(first), next(first)]
    del first
    whole = list(loader.feeds(picks(epochs=2)))
    reference = fetch(epochs=2)
    assert [feed[:2] for feed in begun] == [feed[:2] for feed in reference[:2]]
    assert [feed[:2] for feed in whole] == [feed[:2] for feed in reference]
    assert all(torch.equal(a.inputs["drawn"], b.inputs["drawn"]) for a, b in zip(whole, reference, strict=True))


def test_no_pick_gives_no_feed():
    assert list(MicroBatchLoader(Draws(), 7, LoaderOptions()).feeds([])) == []


def test_torchs_generator_outside_is_not_moved_by_starting_to_fetch():
    state = torch.get_rng_state()
    MicroBatchLoader(Draws(), 7, LoaderOptions()).feeds(picks())
    assert torch.equal(torch.get_rng_state(), state)


def test_picks_need_not_come_from_a_grid():
    pick = Pick(MicroBatch(epoch=0, step=0, number=0, start=0, stop=2), [9, 0])
    (feed,) = MicroBatchLoader(Draws(), 7, LoaderOptions()).feeds([pick])
    assert feed.inputs["index"].tolist() == [9, 0]


def test_streams_are_refused_in_words():
    with pytest.raises(DataError, match="Stream is an IterableDataset"):
        MicroBatchLoader(Stream(), 0, LoaderOptions())


@pytest.mark.parametrize(("dataset", "missing"), [(iter(()), "__len__ and no __getitem__"), ({1, 2}, "__getitem__")])
def test_what_has_no_length_or_items_is_refused_with_what_it_lacks(dataset, missing):
    with pytest.raises(DataError, match=rf"{type(dataset).__name__} has no {missing}"):
        check_map_style(dataset)


class Rows(Dataset):
    """The items of a list, fetched one by one."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def masked(samples):
    """A collator that draws, as those of masked language models do."""
    return [(sample, random.random(), float(np.random.rand()), float(torch.rand(()))) for sample in samples]


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_a_collator_draws_for_a_list_is_what_it_draws_for_any_dataset_and_in_workers(kind):
    rows = kind({"index": index} for index in range(10))
    of_list = fetch(rows, collator=masked)
    assert of_list == fetch(Rows(rows), collator=masked)
    assert of_list == fetch(rows, collator=masked, num_workers=1)
    assert len({draw for feed in of_list for _, draw, *_ in feed.inputs}) == 10


def test_a_list_of_ones_own_class_may_draw():
    class Noisy(list):
        def __getitem__(self, index):
            return {"index": index, "drawn": [torch.rand(()).item()]}

    noisy = Noisy(range(10))
    assert drawn(fetch(noisy, batch=3)) == drawn(fetch(noisy, batch=2))
