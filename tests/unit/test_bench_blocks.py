import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.cli.bench.blocks import DISTURBED, Block, Estimate, counted, estimate, foreign_share, geometric_mean, short, spoilt
from allstep.cli.bench.cores import TICK, busy_seconds


def block(seconds, foreign=0.0):
    return Block(seconds=seconds, foreign=foreign)


def ratio(median):
    return median["a"] / median["b"]


seconds = st.floats(1e-6, 1e3)


def test_disturbed_blocks_do_not_count():
    blocks = [block(1.0), block(9.0, DISTURBED + 0.01), block(2.0, DISTURBED), block(3.0)]
    assert counted(blocks) == [1.0, 2.0, 3.0]


def test_where_too_few_are_undisturbed_the_least_disturbed_count():
    blocks = [block(1.0, 0.9), block(2.0, 0.2), block(3.0, 0.3), block(4.0, 0.0), block(5.0, 0.8)]
    assert counted(blocks) == [4.0, 2.0, 3.0]
    assert counted(blocks, least=1) == [4.0]


def test_what_was_spoilt_is_told_and_whether_each_side_has_enough():
    quiet, busy = [block(1.0)] * 4, [block(1.0), block(1.0), block(1.0, 0.5)]
    assert spoilt([quiet, busy]) == {"measured": 7, "disturbed": 1, "enough": False}
    assert spoilt([quiet, busy], least=2)["enough"] is True


def test_the_estimate_is_of_medians_not_of_means():
    found = estimate({"a": [1.0, 1.0, 1.0, 100.0, 1.0], "b": [2.0, 2.0, 2.0]}, ratio)
    assert found is not None
    assert found.value == 0.5


@given(st.lists(seconds, min_size=1, max_size=9), st.lists(seconds, min_size=1, max_size=9))
def test_the_value_lies_in_its_interval_and_the_interval_between_the_extremes(a, b):
    found = estimate({"a": a, "b": b}, ratio)
    assert found is not None
    assert min(a) / max(b) <= found.low <= found.value <= found.high <= max(a) / min(b)


def test_the_same_blocks_give_the_same_interval():
    samples = {"a": [1.0, 1.3, 1.1, 1.2], "b": [2.0, 2.2, 2.4]}
    assert estimate(samples, ratio) == estimate(samples, ratio)


def test_the_interval_holds_the_true_ratio_in_nearly_all_cases():
    draw, held = random.Random(4), 0
    for _ in range(100):
        samples = {side: [draw.gauss(middle, 0.1) for _ in range(15)] for side, middle in (("a", 3.0), ("b", 2.0))}
        found = estimate(samples, ratio)
        assert found is not None
        held += found.low <= 1.5 <= found.high
    assert held >= 88


def test_more_blocks_give_a_narrower_interval():
    draw = random.Random(1)
    values = [draw.gauss(1.0, 0.1) for _ in range(200)]
    few = estimate({"a": values[:5], "b": [1.0]}, ratio)
    many = estimate({"a": values, "b": [1.0]}, ratio)
    assert few is not None
    assert many is not None
    assert many.high - many.low < (few.high - few.low) / 2


def test_a_number_that_means_nothing_gives_no_estimate():
    assert estimate({"a": [1.0, 2.0]}, lambda median: None) is None


def test_draws_in_which_the_number_means_nothing_are_left_out():
    found = estimate({"a": [1.0, 2.0, 3.0]}, lambda median: median["a"] if median["a"] != 1.0 else None)
    assert found == Estimate(value=2.0, low=2.0, high=3.0)


def test_a_geometric_mean_is_between_and_narrower_than_its_parts():
    one, other = Estimate(value=2.0, low=1.8, high=2.2), Estimate(value=8.0, low=7.2, high=8.8)
    mean = geometric_mean([one, other])
    assert mean.value == pytest.approx(4.0)
    # independent errors of 10 %: divided by the square root of their number
    assert math.log(mean.high / mean.value) == pytest.approx(math.log(1.1) / math.sqrt(2))
    assert math.log(mean.value / mean.low) == pytest.approx(math.log(1 / 0.9) / math.sqrt(2))
    alone = geometric_mean([one])
    assert (alone.value, alone.low, alone.high) == pytest.approx((one.value, one.low, one.high))


def test_a_ratio_read_the_other_way_round():
    found = Estimate(value=4.0, low=2.0, high=5.0).inverse()
    assert (found.value, found.low, found.high) == (0.25, 0.2, 0.5)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (0.01234, "0.012"), (0.1234, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (-1.5, "-1.50")],
)
def test_numbers_have_three_digits(number, text):
    assert short(number) == text


def test_what_others_took_is_all_that_was_busy_but_for_our_own_and_the_rounding_of_the_clock():
    assert foreign_share(busy=2.0, own=1.5, wall=1.0, cores=2, tick=0.01) == pytest.approx(0.24)
    assert foreign_share(busy=1.5, own=1.6, wall=1.0, cores=2, tick=0.01) == 0.0
    assert foreign_share(busy=9.0, own=0.0, wall=1.0, cores=2, tick=0.01) == 1.0


def test_idle_and_waiting_cores_are_not_busy_stolen_ones_are():
    assert busy_seconds("cpu  1 20 300 99999 88888 4000 50000 600000 7 8") == pytest.approx(654321 * TICK)
