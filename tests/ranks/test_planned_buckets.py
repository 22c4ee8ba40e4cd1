"""Buckets that nobody sized are cut where measurements say: once, alike on all ranks, and without changing a gradient."""

from collections.abc import Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from allstep import DistributedDataParallel
from allstep.comm.communicator import Communicator, Pending
from allstep.ddp import planning, timing
from allstep.ddp.plan import TransferCost, plan_cuts
from allstep.ddp.planning import MEASURED_REDUCTIONS
from allstep.errors import RankFailedError

MIB = 1 << 20
STEPS = MEASURED_REDUCTIONS + 3
SMALL = TransferCost(latency=1e-6, per_byte=1e-9, largest=66 << 10)  # a bucket for each layer, whatever the times


@contextmanager
def costing(cost):
    """Measurements give `cost`; None leaves them as they are."""
    measured = planning.measure_cost
    if cost is not None:
        planning.measure_cost = lambda *_: cost
    try:
        yield
    finally:
        planning.measure_cost = measured


class Layers(nn.Module):
    """Layers of 64 KiB in two paths, of which a call may leave out one."""

    def __init__(self, dtypes=("float32",) * 8, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(128, 128, dtype=getattr(torch, dtype)) for dtype in dtypes)
        self.side = nn.Linear(128, 128)
        self.table = nn.Embedding(50, 128, sparse=sparse)

    def forward(self, x, side=True):
        x = x + self.table(torch.arange(len(x)))
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return self.side(x.float()) if side else x.float()


def batch(rank, step):
    return torch.randn(4, 128, generator=torch.Generator().manual_seed(10 * step + rank))


def fingerprint(model):
    return [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]


def buckets_of(model):
    return [bucket.parameters for bucket in model.bucket_layout.buckets]


def train(rank, cap, options, make=Layers, make_options=(), accumulate=False, side=lambda rank, step: True, set_to_none=True):
    model = DistributedDataParallel(make(**dict(make_options)), bucket_cap_mb=cap, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    gradients, layouts, plans = [], [], []
    for step in range(STEPS):
        if accumulate:
            with model.no_sync():
                model(batch(rank, step) / 2, side(rank, step)).square().mean().backward()
        model(batch(rank, step), side(rank, step)).square().mean().backward()
        gradients.append(fingerprint(model))
        layouts.append(buckets_of(model))
        plans.append(model.bucket_plan)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return gradients, layouts, plans


def planned_and_fixed(rank, size, cost, case):
    with costing(cost):
        planned = train(rank, None, **case)
    return planned, train(rank, 1.0, **case)


def sometimes(rank, step):
    return step % 2 == rank


def never(rank, step):
    return False


CASES = {
    "plain": {"options": {}},
    "accumulated": {"options": {}, "accumulate": True},
    "gradients of their own": {"options": {"gradient_as_bucket_view": False}, "accumulate": True},
    "kept gradients": {"options": {}, "accumulate": True, "set_to_none": False},
    "static graph": {"options": {"static_graph": True}, "side": never},
    "unused, no walk": {"options": {"find_unused_parameters": None}, "side": sometimes},
    "unused, walk": {"options": {"find_unused_parameters": True}, "side": sometimes, "accumulate": True},
    "never used": {"options": {"find_unused_parameters": None}, "side": never},
    "sparse": {"options": {}, "make_options": (("sparse", True),)},
    "two dtypes": {"options": {}, "make_options": (("dtypes", ("float32", "bfloat16", "float64") * 3),)},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_keep_their_bits_when_the_plan_comes(ranks, case):
    results = ranks.run(planned_and_fixed, SMALL, CASES[case])
    for (planned, layouts, plans), (fixed, _, none) in results:
        for mine, other in zip(planned, fixed, strict=True):
            for a, b in zip(mine, other, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
        assert none == [None] * STEPS
        assert plans[:MEASURED_REDUCTIONS] == [None] * MEASURED_REDUCTIONS
        assert all(plan is plans[-1] for plan in plans[MEASURED_REDUCTIONS:])
        assert plans[-1].buckets >= 8
        assert layouts[MEASURED_REDUCTIONS - 1] != layouts[MEASURED_REDUCTIONS] == layouts[-1]
    (_, first, plans), _ = results[0]
    (_, second, others), _ = results[1]
    assert first == second
    assert str(plans[-1]) == str(others[-1])


def test_four_ranks_agree_on_what_they_really_measured(four_ranks):
    results = four_ranks.run(planned_and_fixed, None, CASES["accumulated"])
    plans = [plans[-1] for (_, _, plans), _ in results]
    assert all(plan == plans[0] for plan in plans)
    assert len({str(layouts) for (_, layouts, _), _ in results}) == 1
    assert plans[0].cost.latency >= 0
    assert sum(plans[0].sizes) == sum(p.numel() * 4 for p in Layers().parameters())
    for (planned, _, _), (fixed, _, _) in results:
        for mine, other in zip(planned, fixed, strict=True):
            assert all(torch.allclose(a, b) for a, b in zip(mine, other, strict=True))  # gloo's order of sums follows places


def refused(rank, size, why):
    options = {
        "small": {},
        "sizes": {"bucket_cap_mb": [1.0, 2.0]},
        "delayed": {},
        "hook": {},
        "deterministic": {},
    }[why]
    model = Layers(("float32",) * (2 if why == "small" else 8))
    if why == "small":
        model.side, model.layers = nn.Identity(), nn.ModuleList()
    if why == "delayed":
        last = model.layers[0].weight
        options = {"delay_all_reduce_named_params": [("side.bias", model.side.bias)], "param_to_hook_all_reduce": last}
    model = DistributedDataParallel(model, **options)
    if why == "hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    torch.use_deterministic_algorithms(why == "deterministic")
    layouts = []
    try:
        for step in range(STEPS):
            model(batch(rank, step)).square().mean().backward()
            layouts.append(buckets_of(model))
            model.zero_grad()
    finally:
        torch.use_deterministic_algorithms(False)
    return model.bucket_plan, layouts[MEASURED_REDUCTIONS - 1] == layouts[-1]


@pytest.mark.parametrize("why", ["small", "sizes", "delayed", "hook", "deterministic"])
def test_some_models_keep_their_buckets(four_ranks, why):
    assert four_ranks.run(refused, why) == [(None, True)] * 4


def deterministic(rank, size):
    torch.use_deterministic_algorithms(True)
    try:
        return train(rank, None, {})[2][-1] is not None
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_sum_of_two_ranks_has_one_order_so_that_deterministic_runs_are_planned_too(ranks):
    assert ranks.run(deterministic) == [True, True]


def test_alone_there_is_nothing_to_plan():
    model = DistributedDataParallel(Layers())
    for step in range(STEPS):
        model(batch(0, step)).square().mean().backward()
    assert model.bucket_plan is None


def without_forwards(rank, size, when):
    model = DistributedDataParallel(Layers(), find_unused_parameters=None)
    with costing(SMALL):
        for step in range(STEPS):
            model.zero_grad()
            if rank == 0 or step not in when:
                model(batch(rank, step)).square().mean().backward()
            else:
                model.take_part()
    return fingerprint(model), buckets_of(model), model.bucket_plan


@pytest.mark.parametrize("when", [range(STEPS), [MEASURED_REDUCTIONS], range(1, MEASURED_REDUCTIONS + 1)], ids=str)
def test_a_rank_that_only_takes_part_switches_with_the_others(ranks, when):
    first, second = ranks.run(without_forwards, when)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert first[1:] == second[1:]
    assert first[2].buckets >= 8


def nobody_ran_a_backward(rank, size):
    model = DistributedDataParallel(Layers(), find_unused_parameters=None)
    for _ in range(STEPS):
        model.take_part()
    return model.bucket_plan, model.reductions


def test_without_any_backward_there_is_no_plan(ranks):
    assert ranks.run(nobody_ran_a_backward) == [(None, STEPS)] * 2


def uneven(rank, size, counts):
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with costing(SMALL), model.join():
        for step in range(counts[rank]):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()], buckets_of(model), model.bucket_plan, model.reductions


@pytest.mark.parametrize("counts", [(STEPS, MEASURED_REDUCTIONS), (STEPS, 1), (2, STEPS)], ids=str)
def test_ranks_without_data_switch_under_join(ranks, counts):
    first, second = ranks.run(uneven, counts)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert first[1:] == second[1:]
    assert first[2].buckets >= 8
    assert first[3] == STEPS


def broken_off(rank, size, broken):
    """Rank 1's forward, or its backward after some gradients, raises in the steps `broken`."""
    model = DistributedDataParallel(Layers())
    told = []

    def fail(gradient):
        if rank == 1 and step in broken:
            raise FloatingPointError("too large")

    model.module.layers[4].weight.register_hook(fail)
    with costing(SMALL):
        for step in range(STEPS):
            model.zero_grad()
            try:
                model(batch(rank, step)).square().mean().backward()
            except (FloatingPointError, RankFailedError) as error:
                told.append((step, type(error).__name__))
    return fingerprint(model), buckets_of(model), model.bucket_plan, told


@pytest.mark.parametrize("broken", [[0], [1, 2], [MEASURED_REDUCTIONS - 1], [MEASURED_REDUCTIONS]], ids=str)
def test_backwards_that_break_off_do_not_part_the_ranks(ranks, broken):
    first, second = ranks.run(broken_off, broken)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert first[1:3] == second[1:3]
    assert first[2].buckets >= 8
    assert first[3] == [(step, "RankFailedError") for step in broken]
    assert second[3] == [(step, "FloatingPointError") for step in broken]


def two_wrappers(rank, size):
    one, two = DistributedDataParallel(Layers()), DistributedDataParallel(Layers())
    with costing(SMALL):
        for step in range(STEPS):
            one.zero_grad(), two.zero_grad()
            x = batch(rank, step)
            (one(x) + (two(x) if step % 2 else 0.0)).square().mean().backward()
    return fingerprint(one), one.bucket_plan.buckets, two.bucket_plan, two.reductions


def test_wrappers_plan_each_by_their_own_count(ranks):
    first, second = ranks.run(two_wrappers)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert first[1] > 8
    assert first[2:] == second[2:] == (None, STEPS // 2)


def held(rank, size):
    """Gradients that somebody holds over the switch keep their values, and a model that changes later goes on."""
    model = DistributedDataParallel(Layers())
    with costing(SMALL):
        for step in range(MEASURED_REDUCTIONS):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
        kept = [p.grad for p in model.parameters()]
        values = fingerprint(model)
        model.zero_grad()
        model(batch(rank, STEPS)).square().mean().backward()
        planned = model.bucket_plan
        same = all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))
        model.module.more = nn.Linear(128, 128)
        model.module.side = nn.Sequential(model.module.side, model.module.more)
        for step in range(STEPS):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
    return same, planned.buckets, model.bucket_plan, fingerprint(model)


def test_held_gradients_and_changed_models_are_left_right(ranks):
    (same, buckets, plan, first), (also, _, _, second) = ranks.run(held)
    assert same
    assert also
    assert buckets > 8
    assert plan is None  # the model is another one
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- the whole engine on a virtual clock


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def processor_time(self) -> float:
        return 0.0

    thread_time = process_time = processor_time

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Link(Communicator):
    """Two ranks that hold the same; one link, on which a collective takes `latency + per_byte * n` of a clock's seconds."""

    rank, size = 0, 2
    launch = 2e-6

    def __init__(self, clock: Clock, cost: TransferCost) -> None:
        self.clock, self.cost, self.free = clock, cost, 0.0

    def all_reduce(self, tensor: torch.Tensor, *, average: bool = False) -> Pending:
        self.clock.passes(self.launch)
        over = self.free = max(self.free, self.clock.now) + self.cost.of(tensor.numel() * tensor.element_size())
        link = self

        class Transfer:
            def wait(self) -> None:
                tensor.mul_(2.0)
                link.clock.now = max(link.clock.now, over)

        return Transfer()

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        pass

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value]

    def barrier(self) -> None:
        pass


def step_on(clock: Clock, cost: TransferCost, cap: float | None, widths: list[int]) -> tuple[float, DistributedDataParallel]:
    """Seconds on the clock of a backward with its collectives, where each gradient takes time by its size."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    for parameter in layers.parameters():
        parameter.register_hook(lambda gradient: clock.passes(1e-9 * 4 * gradient.numel()))  # 1 GB/s
    model = DistributedDataParallel(layers, process_group=Link(clock, cost), bucket_cap_mb=cap)
    for _ in range(STEPS if cap is None else 3):  # after the first one buckets are laid out once more
        model.zero_grad()
        loss = model(torch.randn(2, widths[0])).square().mean()
        before = clock.now
        loss.backward()
    return clock.now - before, model


@pytest.mark.parametrize("widths", [[32, *[192] * 12, 8], [512, 64, 64, 64, 512, 64, 256, 256], [16, 16, 2000, 16]], ids=str)
@pytest.mark.parametrize("ratio", [0.4, 1.0, 2.5])  # of communication to backward, without latency
@pytest.mark.parametrize("latency", [2e-6, 5e-5])
def test_no_cap_beats_the_plan_on_a_link_of_its_own(monkeypatch, widths, ratio, latency):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    cost = TransferCost(latency=latency, per_byte=ratio * 1e-9)
    planned, model = step_on(clock, cost, None, widths)
    plan = model.bucket_plan
    assert plan is not None
    # the measurement finds the link as it is: latency as a caller sees it, with the launch
    assert plan.cost.latency == pytest.approx(latency + Link.launch, rel=0.01)
    assert plan.cost.per_byte == pytest.approx(ratio * 1e-9, rel=0.01)
    assert plan.cost.overlap == 1.0
    sweep = {cap: step_on(clock, cost, cap, widths)[0] for cap in (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 25.0)}
    # a launch is charged in full where it delays backward, so a plan may give away less than one for each bucket
    assert planned <= min(sweep.values()) + Link.launch * (plan.buckets + 1)
    assert planned <= 1.03 * min(sweep.values())


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.5])  # of communication to backward, with eight latencies
def test_what_can_be_hidden_behind_backward_is_hidden(monkeypatch, ratio):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    widths = [64, *[512] * 25, 64]
    sizes = [size for a, b in reversed([*pairwise(widths)]) for size in (4 * a * b, 4 * b)]  # in the order of their gradients
    ready = [1e-9 * size for size in accumulate(sizes)]
    backward = ready[-1]
    latency = 0.004 * backward
    cost = TransferCost(latency=latency, per_byte=(ratio * backward - 8 * latency) / sum(sizes))
    taken, model = step_on(clock, cost, None, widths)
    assert taken <= plan_cuts(ready, sizes, cost, backward).end + 0.011 * backward
    sent = sum(cost.of(bucket.nbytes) for bucket in model.bucket_layout.buckets)
    # nobody hides the last layer but one: its megabyte is there when backward is nearly over
    assert (backward + sent - taken) / min(backward, sent) > 0.94


def test_in_memory_that_ranks_share_a_bucket_is_closed_at_one_mebibyte_and_nothing_is_planned(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    dear = TransferCost(latency=0.1, per_byte=1e-12)  # a latency for which one bucket would be best
    widths = [512, 1024, 512, 1024, 512, 256, 256, 256, 256]
    _, apart = step_on(clock, dear, None, widths)
    monkeypatch.setattr(Link, "shares_memory", True)
    monkeypatch.setattr(Link, "post_number", lambda _, value: lambda: [value, value])
    _, sharing = step_on(clock, dear, None, widths)
    assert len(apart.bucket_layout.buckets) == 1
    assert apart.bucket_plan is not None
    assert sharing.bucket_plan is None
    *full, _ = sharing.bucket_layout.buckets
    assert len(full) > 1
    assert all(bucket.gradients * 4 >= 1 << 20 > (bucket.gradients - bucket.slots[-1].numel) * 4 for bucket in full)
