"""Orders: permutations that seed and epoch fix, lengths put together, samplers of the user's that give the same everywhere."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from allstep.data.order import (
    BLOCK,
    BalancedOrder,
    LengthGroupedOrder,
    SampledOrder,
    SequentialOrder,
    ShuffledOrder,
    order_of,
)
from allstep.errors import DataError

SEEDS = st.integers(0, 2**32 - 1)


@given(samples=st.integers(1, 200), seed=SEEDS, epoch=st.integers(0, 1000))
def test_an_order_is_a_permutation_that_seed_and_epoch_fix(samples, seed, epoch):
    order = ShuffledOrder(samples, seed).places(epoch)
    assert sorted(order.tolist()) == list(range(samples))
    assert order.tolist() == ShuffledOrder(samples, seed).places(epoch).tolist()


def test_orders_differ_between_epochs_and_seeds():
    orders = {tuple(ShuffledOrder(50, seed).places(epoch).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_the_order_of_an_epoch_is_pinned():
    """A resumed run must find the order that the stopped one had, on another machine and under a later version too."""
    assert ShuffledOrder(10, 42).places(0).tolist() == [8, 4, 0, 7, 5, 2, 6, 1, 9, 3]
    assert ShuffledOrder(10, 42).places(1).tolist() == [1, 2, 3, 7, 0, 8, 4, 9, 5, 6]
    assert ShuffledOrder(30_000, 1).places(1)[:5].tolist() == [19063, 455, 23236, 11805, 26481]


def test_large_seeds_and_epochs_are_taken():
    assert len(ShuffledOrder(3, 2**63 - 1).places(2**40)) == 3


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=120)


@given(lengths=LENGTHS, batch=st.integers(1, 3), seed=SEEDS, epoch=st.integers(0, 3))
def test_like_lengths_are_together_and_the_longest_come_first(lengths, batch, seed, epoch):
    order = LengthGroupedOrder(lengths, batch, seed).places(epoch)
    assert sorted(order) == list(range(len(lengths)))
    found = [lengths[index] for index in order]
    assert found[0] == max(lengths)
    rises = sum(1 for before, after in pairwise(found) if after > before)
    assert rises < -(-len(lengths) // (BLOCK * batch)), "each block falls"


@given(lengths=LENGTHS, size=st.integers(1, 4), count=st.integers(1, 4), seed=SEEDS)
def test_micro_batches_are_balanced_and_a_step_has_the_samples_that_it_had(lengths, size, count, seed):
    balanced, plain = (
        list(order.places(0)) for order in (BalancedOrder(lengths, size, count, seed), ShuffledOrder(len(lengths), seed))
    )
    step = size * count
    for start in range(0, len(lengths), step):
        whole = balanced[start : start + step]
        assert sorted(whole) == sorted(int(index) for index in plain[start : start + step])
        if len(whole) == step:
            totals = [sum(lengths[index] for index in whole[at : at + size]) for at in range(0, step, size)]
            assert max(totals) - min(totals) <= max(lengths[index] for index in whole)


class Draws(Sampler):
    """Draws with every generator that there is, and counts how often it was asked."""

    def __init__(self, samples):
        self.samples, self.epochs = samples, []

    def __len__(self):
        return self.samples

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        yield from random.choices(range(self.samples), k=self.samples // 2)
        yield from torch.randint(self.samples, (self.samples - self.samples // 2,))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Draws(20),
        lambda: WeightedRandomSampler([1.0, 5.0, 2.0], 20),
        lambda: WeightedRandomSampler([1.0, 5.0, 2.0], 20, generator=torch.Generator().manual_seed(3)),
        lambda: BatchSampler(RandomSampler(range(20), replacement=True), 3, drop_last=False),
    ],
)
def test_a_sampler_gives_the_same_in_an_epoch_whenever_it_is_asked(make):
    order, again = SampledOrder(make(), 7), SampledOrder(make(), 7)
    state = torch.get_rng_state()
    epochs = [list(order.places(epoch)) for epoch in range(3)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert list(again.places(2)) == epochs[2]
    assert epochs[0] != epochs[1] != epochs[2]
    assert list(SampledOrder(make(), 8).places(2)) != epochs[2] or make().__dict__.get("generator") is not None


def test_places_of_batches_give_the_samples_in_them():
    order = SampledOrder(BatchSampler(SequentialSampler(range(7)), 3, drop_last=False), 0)
    assert len(order) == 3
    assert order.take(0, 1, 3) == [3, 4, 5, 6]


def test_a_sampler_that_changes_its_length_is_refused():
    class Shrinks(Draws):
        def __iter__(self):
            yield from range(self.samples - 1)

    with pytest.raises(DataError, match=r"Shrinks gave 4 items in epoch 0, and its length is 5"):
        SampledOrder(Shrinks(5), 0).take(0, 0, 1)


def test_torchs_own_samplers_are_known():
    data = list(range(10))
    assert isinstance(order_of(SequentialSampler(data), 10, 3), SequentialOrder)
    assert order_of(RandomSampler(data), 10, 3).take(1, 0, 10) == ShuffledOrder(10, 3).take(1, 0, 10)
    assert isinstance(order_of(RandomSampler(data, num_samples=4), 10, 3), SampledOrder)
    shared = DistributedSampler(data, num_replicas=2, rank=1, seed=5)
    assert order_of(shared, 10, 3).take(0, 0, 10) == ShuffledOrder(10, 5).take(0, 0, 10)
    batches = order_of(BatchSampler(DistributedSampler(data, 2, 0, shuffle=False), 4, drop_last=False), 10, 3)
    assert [batches.take(0, at, at + 1) for at in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_sampler_without_a_length_is_refused_as_it_may_never_end():
    class Endless(Sampler):
        def __iter__(self):
            while True:
                yield 0

    with pytest.raises(DataError, match="Endless has no length"):
        len(SampledOrder(Endless(), 0))
