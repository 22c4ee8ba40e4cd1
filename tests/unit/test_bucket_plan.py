"""Where buckets are cut: the plan is the best of all plans in the model, and says why it was chosen."""

import math
import sys
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.ddp.plan import BucketPlan, TransferCost, expected_end, plan_cuts

MIB = 1 << 20


def link(ready, nbytes, cuts, cost):
    """The model told once more, as events: a queue of full buckets before one link."""
    clock = 0.0
    for first, last in pairwise([0, *cuts, len(ready)]):
        full = max(ready[first:last])
        clock = full if full > clock else clock
        clock += cost.latency + cost.per_byte * sum(nbytes[first:last])
    return clock


def step(ready, nbytes, cuts, cost, end):
    """Seconds that a step's backward and collectives take, less what no cut can change."""
    return cost.overlap * max(link(ready, nbytes, cuts, cost), end) + (len(cuts) + 1) * cost.each


def all_cuts(count, nbytes, largest):
    places = range(1, count)
    for cuts in chain.from_iterable(combinations(places, k) for k in range(count)):
        groups = [nbytes[first:last] for first, last in pairwise([0, *cuts, count])]
        if all(len(group) == 1 or sum(group) <= largest for group in groups):
            yield cuts


@st.composite
def problems(draw):
    count = draw(st.integers(1, 10))
    gaps = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    ready = [sum(gaps[: i + 1]) / 8 for i in range(count)]
    if draw(st.booleans()):
        ready = draw(st.permutations(ready))
    nbytes = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    cost = TransferCost(
        latency=draw(st.sampled_from([0.0, 0.125, 0.5, 2.0])),
        per_byte=draw(st.sampled_from([0.0, 0.03125, 0.125, 0.5])),
        launch=draw(st.sampled_from([0.0, 0.0, 0.0625, 0.5])),
        overlap=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        largest=draw(st.sampled_from([sys.maxsize, 20, 60])),
    )
    return ready, nbytes, cost, max(ready) + draw(st.integers(0, 8)) / 8


@given(problems())
def test_no_plan_is_better_and_none_as_good_has_fewer_buckets(problem):
    ready, nbytes, cost, end = problem
    plan = plan_cuts(ready, nbytes, cost, end)
    steps = {cuts: step(ready, nbytes, cuts, cost, end) for cuts in all_cuts(len(ready), nbytes, cost.largest)}
    assert plan.cuts in steps  # ascending, inside, and no bucket merged beyond the largest size
    best = min(steps.values())
    assert math.isclose(steps[plan.cuts], best, rel_tol=1e-12, abs_tol=1e-12)
    assert len(plan.cuts) == min(len(cuts) for cuts, taken in steps.items() if math.isclose(taken, best, rel_tol=1e-12))
    assert math.isclose(plan.end, link(ready, nbytes, plan.cuts, cost), rel_tol=1e-12)
    assert math.isclose(plan.one_bucket_end, link(ready, nbytes, (), cost), rel_tol=1e-12)


@given(problems(), st.sampled_from([0.25, 1.0, 4.0]))
def test_slack_is_kept_and_bought_for_something(problem, slack):
    ready, nbytes, cost, end = problem
    best, robust = plan_cuts(ready, nbytes, cost, end).cuts, plan_cuts(ready, nbytes, cost, end, slack=slack).cuts
    assert robust in all_cuts(len(ready), nbytes, cost.largest)
    assert step(ready, nbytes, robust, cost, end) <= step(ready, nbytes, best, cost, end) + slack + 1e-9
    in_doubt = [cost.slower(factor) for factor in (0.75, 1.0, 1.5)]
    means = [sum(step(ready, nbytes, cuts, other, end) for other in in_doubt) for cuts in (robust, best)]
    assert means[0] <= means[1] + 1e-9


def test_a_robust_plan_does_not_wait_with_its_first_bucket_until_it_only_just_works():
    nbytes = MODELS["chain of equal layers"]
    ready = [0.1 * sum(nbytes[: i + 1]) / sum(nbytes) for i in range(len(nbytes))]
    cost = TransferCost(latency=4e-4, per_byte=0.05 / sum(nbytes), launch=5e-5)
    best, robust = plan_cuts(ready, nbytes, cost, 0.1), plan_cuts(ready, nbytes, cost, 0.1, slack=0.001)
    assert robust.sizes[0] < best.sizes[0] / 1.5
    slow = cost.slower(2.0)
    assert link(ready, nbytes, robust.cuts, slow) < link(ready, nbytes, best.cuts, slow)


def capped(nbytes, cap, first=None, last=0):
    """Cuts of buckets of at most `cap` bytes, with a smaller first and last one where asked: what a fixed cap gives."""
    cuts, size, tail = [], 0, len(nbytes)
    while tail and sum(nbytes[tail - 1 :]) <= last:
        tail -= 1
    for i, more in enumerate(nbytes[:tail]):
        limit = first if first is not None and not cuts else cap
        if i and (not cuts or cuts[-1] < i) and size + more > limit:
            cuts.append(i)
            size = 0
        size += more
    return tuple(cuts) + ((tail,) if 0 < tail < len(nbytes) else ())


MODELS = {
    "chain of equal layers": [64 * 512 * 4, *[MIB] * 24, 128 << 10],
    "transformer": [2 * MIB, *[64 << 10, MIB, 4096, 4 * MIB, 16 << 10, 4 * MIB, 4096, 4096] * 6, 8 * MIB],
    "400 small tensors": [4096, 256] * 200,
    "one large tensor first": [64 * MIB, *[MIB] * 16],
    "one large tensor last": [*[MIB] * 16, 64 * MIB],
}


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9, 1.0, 1.5, 4.0])  # communication over backward
@pytest.mark.parametrize("latency", [1e-5, 4e-4, 5e-3])  # over backward
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_beats_or_equals_every_cap_on_a_virtual_clock(name, latency, ratio):
    nbytes, backward = MODELS[name], 0.1
    total = sum(nbytes)
    ready = [backward * sum(nbytes[: i + 1]) / total for i in range(len(nbytes))]
    cost = TransferCost(latency=latency * backward, per_byte=ratio * backward / total)
    plan = plan_cuts(ready, nbytes, cost, backward)
    caps = [total * k / 60 for k in range(61)]
    for cap in caps:
        for first in (None, 4096, MIB):
            for last in (0, 4096, MIB):
                assert plan.end <= link(ready, nbytes, capped(nbytes, cap, first, last), cost) * (1 + 1e-9)
    smallest_last = ready[-1] + cost.of(nbytes[-1])
    assert plan.end >= max(smallest_last, ready[0] + cost.latency + cost.per_byte * total) * (1 - 1e-9)


def test_nearly_all_of_a_chain_is_hidden_behind_backward():
    nbytes = MODELS["chain of equal layers"]
    ready = [0.1 * sum(nbytes[: i + 1]) / sum(nbytes) for i in range(len(nbytes))]
    for ratio in (0.5, 0.9, 1.5):
        cost = TransferCost(latency=0.0004, per_byte=(ratio * 0.1 - 8 * 0.0004) / sum(nbytes), launch=5e-5)
        plan = plan_cuts(ready, nbytes, cost, 0.1)
        sent = plan.buckets * cost.latency + cost.per_byte * sum(nbytes)
        assert (0.1 + sent - plan.end) / min(0.1, sent) > 0.95
        assert plan.buckets < len(nbytes)


def test_without_any_overlap_there_are_as_few_buckets_as_the_cache_allows():
    ready = [0.01 * i for i in range(1, 17)]
    cost = TransferCost(latency=1e-5, per_byte=1e-10, overlap=0.0)
    assert plan_cuts(ready, [MIB] * 16, cost, 0.16).cuts == ()
    plan = plan_cuts(ready, [MIB] * 16, TransferCost(latency=1e-5, per_byte=1e-10, overlap=0.0, largest=4 * MIB), 0.16)
    assert plan.sizes == (4 * MIB,) * 4


def test_what_starting_a_collective_costs_decides_how_many_there_are():
    nbytes = MODELS["chain of equal layers"]
    ready = [0.1 * (i + 1) / len(nbytes) for i in range(len(nbytes))]
    counts = [
        plan_cuts(ready, nbytes, TransferCost(latency=1e-5, per_byte=0.08 / sum(nbytes), launch=launch), 0.1).buckets
        for launch in (0.0, 1e-4, 1e-3, 1e-2, 1.0)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[-1] == 1


def test_two_thousand_gradients_are_planned_exactly_too():
    nbytes = [(i * 7919) % 65536 + 4 for i in range(2000)]
    ready = [1e-4 * (i + 1) for i in range(2000)]
    cost = TransferCost(latency=1e-4, per_byte=0.15 / sum(nbytes), launch=2e-5)
    plan = plan_cuts(ready, nbytes, cost, ready[-1])
    for at in (0, len(plan.cuts) // 2, len(plan.cuts) - 1):  # no cut can be moved or left out for the better
        for other in (plan.cuts[:at] + plan.cuts[at + 1 :], *(_moved(plan.cuts, at, by) for by in (-5, -1, 1, 5))):
            if all(a < b for a, b in pairwise([0, *other, 2000])):
                assert step(ready, nbytes, other, cost, ready[-1]) >= step(ready, nbytes, plan.cuts, cost, ready[-1]) - 1e-12


def _moved(cuts, at, by):
    return (*cuts[:at], cuts[at] + by, *cuts[at + 1 :])


def test_a_plan_says_what_was_chosen_and_why():
    cost = TransferCost(latency=2.1e-4, per_byte=1 / 1.9e9, launch=3e-5)
    ready = [0.031 * (i + 1) / 16 for i in range(16)]
    plan = plan_cuts(ready, [MIB] * 16, cost, 0.031, before_end=expected_end(ready, [MIB] * 16, (5, 10, 15), cost))
    lines = str(plan).splitlines()
    assert lines[0].startswith(f"{plan.buckets} buckets for 16 MiB of gradients of ")
    assert "latency 0.21 ms, 1.9 GB/s" in lines[1]
    assert f"Backward 31 ms; expected exposed {1e3 * plan.exposed:.3g} ms" in lines[2]
    assert f"one bucket would expose {1e3 * plan.one_bucket_exposed:.3g} ms" in lines[2]
    assert f"the buckets of before {1e3 * plan.before_exposed:.3g} ms" in lines[2]
    assert len(lines) == 3


def test_nothing_to_plan_is_an_error():
    cost = TransferCost(latency=0.0, per_byte=0.0)
    with pytest.raises(ValueError, match="0 ready times and 0 sizes"):
        plan_cuts([], [], cost, 1.0)
    with pytest.raises(ValueError, match="2 ready times and 1 sizes"):
        plan_cuts([1.0, 2.0], [3], cost, 1.0)


def test_a_backward_that_goes_on_after_the_last_gradient_hides_more():
    cost = TransferCost(latency=0.01, per_byte=0.01)
    plan = plan_cuts([0.1, 0.2], [4, 4], cost, 0.5)
    assert plan.cuts == ()
    assert plan.exposed == 0.0
    assert isinstance(plan, BucketPlan)
    assert "1 bucket for" in str(plan)
