"""What a collective costs is found again from measurements, also disturbed ones; ready times are those of the last rank."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.comm.communicator import SoloCommunicator
from allstep.ddp import timing
from allstep.ddp.timing import Backward, ReadyTimes, fit_cost, hidden_share, measure_cost, slowest

KIB, MIB = 1 << 10, 1 << 20
SIZES = (32 * KIB, 256 * KIB, 2 * MIB, 8 * MIB)

latencies = st.floats(1e-6, 1e-2)
speeds = st.floats(1e7, 1e11)  # bytes a second


@given(latencies, speeds)
def test_latency_and_bandwidth_are_found_again(latency, speed):
    cost = fit_cost([(size, latency + size / speed) for size in SIZES for _ in range(6)])
    usable = [size for size in SIZES if size <= cost.largest]
    assert all(cost.of(size) == pytest.approx(latency + size / speed, rel=1e-3) for size in usable)
    assert cost.largest > 8 * MIB  # each byte of a larger one costs less


@given(latencies, speeds, st.lists(st.floats(1.0, 100.0), min_size=4 * 3, max_size=4 * 3), st.randoms())
def test_whatever_slows_down_half_of_the_measurements_changes_nothing(latency, speed, slower, random):
    undisturbed = [(size, latency + size / speed) for size in SIZES for _ in range(3)]
    disturbed = [(size, seconds * factor) for (size, seconds), factor in zip(undisturbed, slower, strict=True)]
    samples = [*undisturbed, *disturbed]
    random.shuffle(samples)
    assert fit_cost(samples) == fit_cost(undisturbed)


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.floats(0.0, 10.0)), min_size=1, max_size=40))
def test_no_noise_makes_a_cost_below_zero(samples):
    cost = fit_cost(samples)
    assert cost.latency >= 0
    assert cost.per_byte >= 0
    assert cost.latency + cost.per_byte > 0
    assert KIB < cost.largest < sys.maxsize


def test_sizes_whose_bytes_are_dear_are_not_merged_up_to_and_do_not_bend_the_line():
    line = [(size, 1e-4 + size * 1e-9) for size in SIZES[:3]]
    cost = fit_cost([*line, (8 * MIB, 3e-9 * 8 * MIB)])
    assert cost.of(MIB) == pytest.approx(1e-4 + MIB * 1e-9)
    assert cost.largest == 4 * MIB  # between 2 and 8


def test_one_size_gives_a_latency_only():
    cost = fit_cost([(4096, 3.0), (4096, 2.0)])
    assert (cost.latency, cost.per_byte) == (2.0, 0.0)


def test_what_hides_is_what_takes_no_processor_time_from_backward():
    assert hidden_share(2.0, 0.0, 0.0, has_spare_cores=False) == 1.0  # a link of its own
    assert hidden_share(2.0, 0.5, 1.5, has_spare_cores=False) == 0.25  # threads that share the cores of backward
    assert hidden_share(2.0, 0.5, 1.5, has_spare_cores=True) == 0.75
    assert hidden_share(2.0, 2.0, 2.0, has_spare_cores=True) == hidden_share(1.0, 0.0, 3.0, has_spare_cores=False) == 0.1


@pytest.mark.parametrize(
    ("places", "spare"),
    [
        ([("a", {0, 1}, 1)], True),
        ([("a", {0, 1}, 1)] * 2, False),
        ([("a", {0, 1}, 1), ("a", {2, 3}, 1)], True),
        ([("a", set(range(8)), 3)] * 2, True),
        ([("a", set(range(8)), 4)] * 2, False),
        ([("a", {0, 1}, 1), ("b", {0, 1}, 1)], True),
        ([("a", {0, 1}, 1), ("b", {0}, 1)], False),
    ],
)
def test_cores_are_spare_where_no_rank_computes_on_them(places, spare):
    assert (
        timing._have_spare_cores([timing._Place(host, frozenset(cores), threads) for host, cores, threads in places]) is spare
    )


class Clock:
    """A clock that stands still unless it is told otherwise."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    thread_time = process_time = perf_counter


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def test_ready_times_are_those_of_the_fastest_backward_but_the_first(clock):
    times = ReadyTimes(4, torch.device("cpu"))
    for slowness, gradients in ((0.5, (2, 0, 3)), (100.0, (2, 0)), (2.0, (2, 0)), (5.0, (2, 0, 3))):
        clock.now += 1000.0
        times.begin()
        for index in gradients:
            clock.now += slowness
            times.note(index)
        clock.now += slowness
        times.end()
    assert times.backward() == Backward(ready=(4.0, None, 2.0, 6.0), end=6.0)


def test_of_a_gradient_that_comes_in_parts_the_last_time_counts(clock):
    times = ReadyTimes(1, torch.device("cpu"))
    times.begin()
    for _ in range(3):
        clock.now += 1.0
        times.note(0)
    times.end()
    assert times.backward() == Backward(ready=(3.0,), end=3.0)


def test_a_rank_that_only_took_part_has_no_times(clock):
    times = ReadyTimes(1, torch.device("cpu"))
    times.end()
    assert times.backward() is None


def test_all_wait_for_the_slowest_rank():
    fast, slow = Backward(ready=(1.0, 2.0, None, None), end=3.0), Backward(ready=(2.0, 1.0, 4.0, None), end=5.0)
    assert slowest([fast, None, slow]) == Backward(ready=(2.0, 2.0, 4.0, None), end=5.0)
    assert slowest([None, None]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("nbytes", [8, 300 * KIB, 20 * MIB])
def test_a_measurement_leaves_random_numbers_alone_and_times_no_more_bytes_than_there_are(dtype, nbytes):
    sizes = set()

    class Recording(SoloCommunicator):
        def all_reduce(self, tensor, *, average=False):
            assert tensor.dtype is dtype
            sizes.add(tensor.numel() * tensor.element_size())
            return super().all_reduce(tensor, average=average)

    state = torch.get_rng_state()
    cost = measure_cost(Recording(), nbytes, dtype, torch.device("cpu"))
    assert torch.equal(state, torch.get_rng_state())
    assert max(sizes) == min(nbytes, 8 * MIB)
    assert 0.0 <= cost.overlap <= 1.0
