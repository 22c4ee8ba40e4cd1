"""The grid as numbers: every sample once, whatever the ranks, and steps that do not depend on them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.data.grid import Grid, MicroBatch, evaluation_picks, training_picks
from allstep.data.order import ShuffledOrder
from allstep.data.position import DataPosition
from allstep.errors import DataError

SIZES, BATCHES, ACCUMULATIONS, RANKS = st.integers(1, 60), st.integers(1, 7), st.integers(1, 4), st.integers(1, 4)
SEEDS = st.integers(0, 2**32 - 1)


def make(samples, batch, places, drop_last=False):
    """None where `drop_last` leaves nothing."""
    if drop_last and samples < batch * places:
        with pytest.raises(DataError, match=rf"{samples} samples, fewer than one global batch of {batch * places}"):
            Grid(samples=samples, micro_batch_size=batch, micro_batches_per_step=places, drop_last=True)
        return None
    return Grid(samples=samples, micro_batch_size=batch, micro_batches_per_step=places, drop_last=drop_last)


def epoch_of(grid, rank, size, seed=0, epoch=0):
    return list(
        training_picks(grid, DataPosition(epoch=epoch), grid.steps_per_epoch, rank, size, ShuffledOrder(grid.samples, seed))
    )


@given(samples=SIZES, batch=BATCHES, accumulation=ACCUMULATIONS, size=RANKS, drop_last=st.booleans(), seed=SEEDS)
def test_over_ranks_and_steps_every_sample_comes_exactly_once(samples, batch, accumulation, size, drop_last, seed):
    grid = make(samples, batch, size * accumulation, drop_last)
    if grid is None:
        return
    picks = [pick for rank in range(size) for pick in epoch_of(grid, rank, size, seed)]
    seen = sorted(index for pick in picks for index in pick.sample_ids)
    if drop_last:
        assert len(seen) == len(set(seen)) == samples - samples % grid.global_batch_size
        assert {pick.micro_batch.size for pick in picks} == {batch}
        assert len(picks) == grid.steps_per_epoch * size * accumulation
    else:
        assert seen == list(range(samples))
    assert all(1 <= len(pick.sample_ids) == pick.micro_batch.size <= batch for pick in picks)


@given(samples=SIZES, batch=BATCHES, accumulation=ACCUMULATIONS, size=RANKS, drop_last=st.booleans())
def test_a_window_is_a_contiguous_block_and_blocks_lie_in_rank_order(samples, batch, accumulation, size, drop_last):
    grid = make(samples, batch, size * accumulation, drop_last)
    if grid is None:
        return
    for step in range(grid.steps_per_epoch):
        windows = [grid.window(0, step, rank, size) for rank in range(size)]
        at = step * grid.global_batch_size
        for rank, window in enumerate(windows):
            assert len(window) <= accumulation
            for place, micro_batch in enumerate(window):
                assert (micro_batch.step, micro_batch.number) == (step, rank * accumulation + place)
                assert micro_batch.start == at
                at = micro_batch.stop
        assert at == grid.samples_before(step + 1)


@given(samples=SIZES, batch=BATCHES, unit=st.integers(1, 3), drop_last=st.booleans(), seed=SEEDS, epoch=st.integers(0, 3))
def test_what_a_step_consists_of_does_not_depend_on_ranks(samples, batch, unit, drop_last, seed, epoch):
    grid = make(samples, batch, 12 * unit, drop_last)
    if grid is None:
        return
    alone = epoch_of(grid, 0, 1, seed, epoch)
    for size in (2, 3, 4):
        together = [pick for rank in range(size) for pick in epoch_of(grid, rank, size, seed, epoch)]
        assert sorted(together, key=lambda pick: (pick.micro_batch.step, pick.micro_batch.number)) == alone


@given(samples=SIZES, batch=BATCHES, size=RANKS, accumulation=ACCUMULATIONS, taken=st.integers(0, 40), seed=SEEDS)
def test_picks_from_a_position_are_the_rest_of_those_from_the_start(samples, batch, size, accumulation, taken, seed):
    grid = make(samples, batch, size * accumulation)
    steps = taken + 5
    for rank in range(size):
        order = ShuffledOrder(grid.samples, seed)
        whole = list(training_picks(grid, DataPosition(), steps, rank, size, order))
        done = list(training_picks(grid, DataPosition(), taken, rank, size, order))
        rest = list(training_picks(grid, DataPosition.after(taken, grid.steps_per_epoch), 5, rank, size, order))
        assert done + rest == whole


@given(samples=SIZES, batch=BATCHES, places=st.integers(1, 12), drop_last=st.booleans())
def test_counts_fit_the_steps(samples, batch, places, drop_last):
    grid = make(samples, batch, places, drop_last)
    if grid is None:
        return
    steps = [
        [grid.micro_batch(0, step, number) for number in range(places)]
        for step in range(grid.steps_per_epoch + (0 if drop_last else 1))
    ]
    sizes = [sum(micro_batch.size for micro_batch in step) for step in steps]
    assert all(sizes[: grid.steps_per_epoch])
    assert not any(sizes[grid.steps_per_epoch :])
    for step in range(grid.steps_per_epoch):
        assert grid.samples_before(step) == sum(sizes[:step])
    assert set(sizes[: samples // grid.global_batch_size]) <= {grid.global_batch_size}


@given(samples=st.integers(0, 60), batch=BATCHES, size=RANKS)
def test_evaluation_takes_each_sample_once_and_ranks_in_order_give_the_datasets_order(samples, batch, size):
    picks = [pick for rank in range(size) for pick in evaluation_picks(samples, batch, rank, size)]
    assert [index for pick in picks for index in pick.sample_ids] == list(range(samples))
    assert [pick.micro_batch.number for pick in picks] == list(range(len(picks)))
    assert all(1 <= len(pick.sample_ids) == pick.micro_batch.size <= batch for pick in picks)
    counts = [len(list(evaluation_picks(samples, batch, rank, size))) for rank in range(size)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("samples", [0, -1])
def test_an_empty_dataset_is_refused(samples):
    with pytest.raises(DataError, match="empty"):
        Grid(samples=samples, micro_batch_size=1, micro_batches_per_step=1)


def test_too_few_samples_for_drop_last_says_all_numbers_and_what_to_set():
    with pytest.raises(DataError) as caught:
        Grid(samples=7, micro_batch_size=2, micro_batches_per_step=4, drop_last=True)
    for said in ("7 samples", "global batch of 8", "4 micro-batches of 2", "dataloader_drop_last=False"):
        assert said in str(caught.value)


def test_the_picture_in_the_modules_head():
    grid = Grid(samples=10, micro_batch_size=2, micro_batches_per_step=4)
    assert [(m.start, m.stop) for m in grid.window(0, 0, 1, 2)] == [(4, 6), (6, 8)]
    assert grid.window(0, 1, 0, 2) == [MicroBatch(epoch=0, step=1, number=0, start=8, stop=10)]
    assert grid.window(0, 1, 1, 2) == []
