"""Which samples of a stream make up which step, and who reads what: numbers only; and the reader, in one process."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from allstep.data.grid import Grid
from allstep.data.loader import LoaderOptions
from allstep.data.stream_loader import StreamLoader, StreamSource
from allstep.data.stream_reader import SavedStream, StreamReader, fingerprint, is_plain, keeps_state
from allstep.data.streams import Split, StreamGrid, choose_split, is_stream, length_of, shards_of, steps_of
from allstep.errors import DataError

WHOLE = Split(False, "by samples")
SMALL = st.integers(1, 4)


class Counting(IterableDataset):
    """0, 1, 2, …, each with what the three generators give."""

    def __init__(self, samples=10):
        self.samples = samples

    def __iter__(self):
        for index in range(self.samples):
            yield {"index": index, "drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))]}


class Resumable(Counting):
    at = begin = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]

    def __iter__(self):
        for self.at in range(self.begin + 1, self.samples + 1):  # noqa: B020 - where it is once the sample is out
            yield {"index": self.at - 1}


def grid_of(micro_batch=2, per_step=4, split=WHOLE, samples=None, **more):
    return StreamGrid(split=split, samples=samples, micro_batch_size=micro_batch, micro_batches_per_step=per_step, **more)


def reader_of(dataset, seed=1, columns=None, grid=None):
    return StreamReader(dataset, seed, columns, (grid or grid_of()).places(0, 1))


# ---- who reads what


@given(micro_batch=SMALL, accumulation=SMALL, size=SMALL, step=st.integers(0, 5))
def test_split_by_samples_a_step_is_cut_as_the_grid_of_map_style_data_is(micro_batch, accumulation, size, step):
    stream, mapped = (
        kind(samples=10**6, micro_batch_size=micro_batch, micro_batches_per_step=size * accumulation, **more)
        for kind, more in ((StreamGrid, {"split": WHOLE}), (Grid, {}))
    )
    for rank in range(size):
        assert stream.places(rank, size).window(1, step) == mapped.window(1, step, rank, size)


@given(micro_batch=SMALL, accumulation=SMALL, size=SMALL, steps=SMALL, by_shards=st.booleans())
def test_each_place_of_every_step_has_samples_of_its_own(micro_batch, accumulation, size, steps, by_shards):
    grid = grid_of(micro_batch, size * accumulation, Split(by_shards, ""))
    ids, numbers = Counter(), Counter()
    for rank in range(size):
        places = grid.places(rank, size)
        for step in range(steps):
            for place in places.window(0, step):
                ids.update(places.sample_ids(place))
                numbers[step, place.number] += 1
    assert ids == Counter(range(steps * grid.global_batch_size))
    assert set(numbers.values()) == {1}
    assert len(numbers) == steps * size * accumulation


@given(accumulation=SMALL, workers=SMALL, steps=st.integers(1, 6))
def test_workers_take_turns_over_the_places_of_a_rank(accumulation, workers, steps):
    places = grid_of(1, accumulation).places(0, 1)
    turns = [places.worker(step, number, workers) for step in range(steps) for number in range(accumulation)]
    assert turns == [turn % workers for turn in range(steps * accumulation)]


@pytest.mark.parametrize(
    ("wanted", "shards", "ranks", "by_shards", "words"),
    [
        ("samples", 8, 2, False, "by samples: each of 2 ranks reads all of it and keeps its own"),
        ("samples", None, 1, False, "by samples: one rank, which reads all of it"),
        ("shards", None, 2, False, "by samples, not by shards: it has no shard() with num_shards"),
        ("shards", 3, 4, False, "by samples, not by shards: 3 shard(s) do not give each of 4 ranks one"),
        ("shards", 6, 3, True, "by shards: 6 over 3 ranks, 2 each"),
        ("shards", 7, 3, True, "by shards: 7 over 3 ranks, which does not divide: 3 on 1 of them, 2 on the others"),
    ],
)
def test_the_policy_and_its_reason(wanted, shards, ranks, by_shards, words):
    split = choose_split(wanted, shards, ranks)
    assert split.by_shards == by_shards
    assert split.reason.startswith(words)


def test_steps_of_an_epoch_are_those_of_the_longest_part_or_with_drop_last_of_the_shortest():
    assert steps_of([10], 4, False) == 3
    assert steps_of([10], 4, True) == 2
    assert steps_of([9, 4], 4, False) == 3
    assert steps_of([9, 4], 4, True) == 1
    assert steps_of([9, None], 4, False) is None


def test_an_empty_stream_and_one_that_drop_last_leaves_nothing_of_are_refused_with_numbers():
    with pytest.raises(DataError, match=r"empty: len\(\) is 0"):
        grid_of(samples=0)
    with pytest.raises(DataError, match=r"5 samples, fewer than one global batch of 8 .*drop_last"):
        grid_of(samples=5, drop_last=True, steps_per_epoch=0)


def test_passes_are_counted_by_length_else_by_the_steps_of_the_run():
    assert grid_of(samples=40, steps_per_epoch=5).epoch_after(2, 3, 100) == 2.6
    assert grid_of().epoch_after(2, 3, 100) == 2.03
    assert grid_of(samples=8, steps_per_epoch=1).epoch_after(0, 3, 100) == 1.0  # longer than its len()


class Bare:
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(("dataset", "expected"), [(Counting(), True), (Bare(), True), ([], False), ((), False), ({}, False)])
def test_what_is_read_from_its_beginning_is_a_stream(dataset, expected):
    assert is_stream(dataset) == expected


@pytest.mark.parametrize("dataset", [iter([1]), {1, 2}, (row for row in [1])])
def test_what_can_be_read_once_only_or_has_no_order_is_none(dataset):
    assert not is_stream(dataset)


def test_lengths_and_shards_are_read_where_they_are():
    class Long(Counting):
        num_shards = 3

        def __len__(self):
            raise TypeError("wraps something without a length")

    assert length_of(Counting()) is None
    assert length_of(Long()) is None
    assert length_of([1, 2]) == 2
    assert shards_of(Long()) is None  # it has no shard()
    Long.shard = lambda self, num_shards, index: self
    assert shards_of(Long()) == 3


# ---- the reader


def test_what_a_sample_draws_depends_on_its_place_and_epoch_not_on_who_reads_or_skips():
    def drawn(epoch, skipped, seed=1):
        reader = reader_of(Counting(), seed)
        reader.open(epoch, tell_epoch=True)
        reader.skip_to(skipped)
        return {sample["index"]: tuple(sample["drawn"]) for sample in reader.take(20)}

    whole = drawn(0, 0)
    assert drawn(0, 6) == {index: whole[index] for index in range(6, 10)}
    others = [*whole.values(), *drawn(1, 0).values(), *drawn(0, 0, seed=2).values()]
    assert len({value for draws in others for value in draws}) == 3 * 10 * 3


def test_columns_that_are_not_taken_are_dropped():
    reader = reader_of(Counting(), columns=frozenset({"index"}))
    reader.open(0, tell_epoch=True)
    assert reader.take(2) == [{"index": 0}, {"index": 1}]


@given(taken=st.integers(0, 10), ahead=st.booleans())
def test_a_state_leads_to_the_next_sample(taken, ahead):
    reader = reader_of(Resumable())
    reader.open(0, tell_epoch=True)
    reader.take(taken)
    saved = reader.saved_at(taken)
    assert saved is not None
    if ahead:
        assert reader.saved_at(taken) == saved  # though a sample was read ahead to know it
    dataset = Resumable()
    other = reader_of(dataset)
    assert other.open(0, tell_epoch=True, saved=saved)
    assert other.position == taken
    assert [sample["index"] for sample in other.take(20)] == list(range(taken, 10))
    assert dataset.begin == 0  # what was loaded does not count for the next pass
    assert [sample["index"] for sample in reader.take(20)] == list(range(taken, 10))


def test_a_state_that_leads_to_another_sample_is_not_used():
    reader = reader_of(Resumable())
    assert not reader.open(0, tell_epoch=True, saved=SavedStream(0, 4, {"at": 3}, fingerprint({"index": 4})))
    assert reader.position == 0
    assert reader.take(1) == [{"index": 0}]


def test_a_state_that_no_checkpoint_could_hold_is_left_out():
    class Odd(Resumable):
        def state_dict(self):
            return {"at": object()}

    reader = reader_of(Odd())
    reader.open(0, tell_epoch=True)
    reader.take(3)
    assert reader.saved_at(3) is None
    assert is_plain({"a": [1, (2.0, "x", None, torch.zeros(1))]})
    assert not is_plain([np.int64(1)])


def test_a_state_that_leaves_out_a_shuffle_buffer_is_no_state():
    class BufferShuffledExamplesIterable:
        ex_iterable = None

    class Formatted:
        ex_iterable = BufferShuffledExamplesIterable()

    stream = Resumable()
    assert keeps_state(stream)
    assert not keeps_state(Counting())
    stream._ex_iterable = Formatted()
    assert not keeps_state(stream)


def test_fingerprints_tell_samples_apart():
    samples = [
        {"a": 1},
        {"a": 2},
        {"b": 1},
        {"a": 1.0},
        {"a": "1"},
        [1, 2],
        torch.tensor([1, 2]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        None,
    ]
    assert len({fingerprint(sample) for sample in samples}) == len(samples)
    assert fingerprint({"a": torch.tensor([1, 2])}) == fingerprint({"a": torch.tensor([1, 2])})


@pytest.mark.parametrize("samples", [0, 1, 2, 5, 6, 7])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_to_evaluate_are_numbered_in_the_order_of_the_stream(samples, size):
    options = LoaderOptions(collator=lambda rows: [sample["index"] for sample in rows])
    feeds = [feed for rank in range(size) for feed in StreamLoader(Counting(samples), 0, options).evaluation(2, rank, size)]
    feeds.sort(key=lambda feed: feed.micro_batch.number)
    assert [feed.micro_batch.number for feed in feeds] == list(range(len(feeds)))
    assert [index for feed in feeds for index in feed.inputs] == list(range(samples))
    assert [index for feed in feeds for index in feed.sample_ids] == list(range(samples))


def test_the_collator_draws_the_same_where_a_sample_was_read_ahead():
    def first_inputs(disturb):
        options = LoaderOptions(collator=lambda samples: random.random())
        places = grid_of(micro_batch=1, per_step=1).places(0, 1)
        items = iter(StreamSource(Counting(3), 7, options, places, epochs=1))
        next(items)  # for which the first sample was read
        disturb()
        return next(items).inputs

    assert first_inputs(lambda: random.seed(1)) == first_inputs(lambda: random.seed(2))
