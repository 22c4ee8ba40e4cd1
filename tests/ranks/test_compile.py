"""torch.compile around, inside, or instead of the wrapper: compiled, reduced, and without a word."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allstep import DistributedDataParallel, SyncBatchNorm
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks


class Net(nn.Module):
    """Two layers with normalisation between them; `kind` adds what is awkward to trace."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.side = nn.Linear(8, 2) if kind == "unused layer" else None
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False) if self.kind == "recomputed" else self.first(x)
        if self.kind == "graph breaks":
            torch._dynamo.graph_break()
        return self.second(self.norm(x).tanh())


def batch(rank: int, number: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * number + rank))


class Counts:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs, self.ops = 0, 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        self.ops += sum(node.op in ("call_function", "call_method", "call_module") for node in graph.graph.nodes)
        return graph.forward


def step_of(order: str, net: nn.Module, backend, options):
    """The wrapper, and a function that runs forward and backward on a batch."""
    compiled = {"backend": backend}
    if order == "inside":
        model = DistributedDataParallel(torch.compile(net, **compiled), **options)
        return model, lambda x: model(x).square().mean().backward()
    if order == "inside, in place":
        net.compile(**compiled)
        model = DistributedDataParallel(net, **options)
        return model, lambda x: model(x).square().mean().backward()
    model = DistributedDataParallel(net, **options)
    if order == "around":
        around = torch.compile(model, **compiled)
        return model, lambda x: around(x).square().mean().backward()
    if order == "around, in place":
        model.compile(**compiled)
        return model, lambda x: model(x).square().mean().backward()

    def loss_of(x):
        return model(x).square().mean()

    def whole(x):
        loss_of(x).backward()

    if order == "loss function":
        loss_function = torch.compile(loss_of, **compiled)
        return model, lambda x: loss_function(x).backward()
    return model, torch.compile(whole, **compiled)


ORDERS = ["inside", "inside, in place", "around", "around, in place", "loss function", "whole step"]


def train(rank, size, order, kind, backend, options, accumulate, sync_batch_norm):
    """Three windows; gradients, reductions, what was warned of, and what was compiled."""
    torch._dynamo.reset()
    counts = Counts()
    net = SyncBatchNorm.convert_sync_batchnorm(Net(kind)) if sync_batch_norm else Net(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, step = step_of(order, net, counts if backend == "counts" else backend, options)
        seen = []
        for number in range(3):
            with model.no_sync() if accumulate else nullcontext():
                if accumulate:
                    step(batch(rank, number + 40))
            step(batch(rank, number))
            seen.append(gradients_of(net))
            model.zero_grad()
    torch._dynamo.reset()
    return seen, model.reductions, [str(warning.message) for warning in caught], (counts.graphs, counts.ops)


def reference(kind, number, accumulate):
    def run(rank: int) -> nn.Module:
        net = Net(kind)
        for each in (number + 40, number) if accumulate else (number,):
            net(batch(rank, each)).square().mean().backward()
        return net

    return mean_of_ranks(2, run)


@pytest.mark.parametrize("accumulate", [False, True], ids=["single", "window"])
@pytest.mark.parametrize("order", ORDERS)
def test_in_whatever_order_the_model_is_compiled_gradients_are_reduced(ranks, order, accumulate):
    """compile(ddp), ddp(compile(model)), both in place, a compiled loss function or step, with and without no_sync.

    Gradients are those of one process, reduced once a window; the model is compiled into one graph, and nothing warns.
    """
    results = ranks.run(train, order, "plain", "counts", {}, accumulate, False, timeout=120)
    for number in range(3):
        assert_mean([seen[number] for seen, *_ in results], reference("plain", number, accumulate), rtol=1e-5, atol=1e-5)
    for _, reductions, words, (graphs, ops) in results:
        assert reductions == 3
        assert words == []
        assert ops >= 4  # two layers, a normalisation, a tanh
        assert graphs <= (1 if "side" in order or "around" in order else 2)  # beside the model, what surrounds it


@pytest.mark.parametrize(
    "order", ["around", pytest.param("inside", marks=pytest.mark.long), pytest.param("whole step", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("unused layer", {"find_unused_parameters": True}),
        ("unused layer", {"find_unused_parameters": None}),
        ("unused layer", {"static_graph": True}),
        ("recomputed", {}),
        ("graph breaks", {}),
        ("plain", {"gradient_as_bucket_view": False, "bucket_cap_mb": 1e-5}),
    ],
    ids=str,
)
def test_compiled_models_go_with_every_flag(ranks, order, kind, options):
    """Unused and recomputed layers and graphs in several pieces, compiled for the backward too (aot_eager)."""
    results = ranks.run(train, order, kind, "aot_eager", options, True, False, timeout=120)
    for number in range(3):
        assert_mean([seen[number] for seen, *_ in results], reference(kind, number, True), rtol=1e-5, atol=1e-5)
    assert all(reductions == 3 for _, reductions, *_ in results)


@pytest.mark.parametrize("order", ["inside", "around"])
def test_a_compiled_model_with_statistics_over_ranks(ranks, order):
    """SyncBatchNorm in a compiled model: its collectives run between graphs; gradients are those of the whole batch."""
    results = ranks.run(train, order, "plain", "aot_eager", {}, False, True, timeout=120)
    for number in range(3):
        net = Net()
        (net(torch.cat([batch(rank, number) for rank in range(2)])).square().mean()).backward()
        assert_mean([seen[number] for seen, *_ in results], gradients_of(net), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_the_default_compiler_gives_the_same(ranks):
    """compile(ddp) with torch's default backend, which writes and compiles code of its own, in windows."""
    results = ranks.run(train, "around", "plain", "inductor", {}, True, False, timeout=240)
    for number in range(3):
        assert_mean([seen[number] for seen, *_ in results], reference("plain", number, True), rtol=1e-5, atol=1e-5)


def strict(rank, size, order):
    torch._dynamo.reset()
    model, step = step_of(order, Net("unused layer"), "eager", {})
    try:
        step(batch(rank, 0))
    except RuntimeError as error:
        return type(error).__name__, str(error), model.reductions
    return None


@pytest.mark.parametrize("order", ORDERS)
def test_errors_of_a_compiled_step_are_those_of_the_engine(ranks, order):
    """A layer without a gradient, flag off: the same error in the same step, whatever was compiled."""
    for name, word, reductions in ranks.run(strict, order, timeout=120):
        assert name == "UnusedParametersError"
        assert "Not used in forward on rank(s) 0, 1: " in word
        assert "side.weight, " in word
        assert reductions == 1
