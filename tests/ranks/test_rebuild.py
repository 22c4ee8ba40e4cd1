"""Buckets are laid out once more, in the order in which rank 0's gradients came; results do not change."""

import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel

BACKENDS = ("gloo", "shm")


class Reversed(nn.Module):
    """Uses its layers in the reverse of the order in which they are registered, so gradients come in registration order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x, last_first=True):
        for layer in reversed(self.layers) if last_first else self.layers:
            x = layer(x).tanh()
        return x


def train(rank, size, wrapper, options, set_to_none, orders):
    model = wrapper(Reversed(), bucket_cap_mb=0.0004, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    gradients = []
    for step in range(4):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        with model.no_sync():
            model(x).square().mean().backward()
        model(2 * x, last_first=orders[rank]).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    names = []
    if wrapper is DistributedDataParallel:
        names = [slot.name for bucket in model.bucket_layout.buckets for slot in bucket.slots]
    return gradients, names


def both(rank, size, *arguments):
    ours = train(rank, size, DistributedDataParallel, *arguments)
    return ours, train(rank, size, nn.parallel.DistributedDataParallel, *arguments)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("orders", [[True, True], [True, False]], ids=["alike", "other order on rank 1"])
def test_layout_follows_rank_0_and_gradients_stay_those_of_torch(ranks, options, set_to_none, orders):
    results = ranks.run(both, options, set_to_none, orders)
    for (ours, names), (theirs, _) in results:
        for mine, other in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
        layers = [int(name.split(".")[1]) for name in names]
        assert layers == sorted(layers)  # registered first, used last, ready first
    assert results[0][0][1] == results[1][0][1]


def rank_without_a_second_forward(rank, size):
    model = DistributedDataParallel(Reversed(), bucket_cap_mb=0.0004, find_unused_parameters=None)
    for step in range(3):
        model.zero_grad()
        if rank == 0 or step != 1:
            model(torch.ones(1, 8)).sum().backward()
        else:
            model.take_part()
    return [p.grad.clone() for p in model.parameters()], model.reductions


def test_a_rank_that_only_takes_part_rebuilds_with_the_others(ranks):
    (first, count), (second, other) = ranks.run(rank_without_a_second_forward)
    assert count == other == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def memory_of_before(rank, size, set_to_none):
    model = DistributedDataParallel(Reversed(), bucket_cap_mb=0.0004)
    buckets = model._reducer.buckets
    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad(set_to_none=set_to_none)
    before, gone = weakref.ref(buckets.gradients.storage), []
    allocate = buckets._communicator.allocate

    def watched(*arguments):
        gone.append(before() is None)
        return allocate(*arguments)

    with mock.patch.object(buckets._communicator, "allocate", watched):
        model(torch.ones(2, 8)).sum().backward()
    return gone


@pytest.mark.parametrize("set_to_none", [True, False])
def test_memory_of_before_goes_before_new_memory_comes_where_no_gradient_lies_there(ranks, set_to_none):
    assert ranks.run(memory_of_before, set_to_none) == [[set_to_none]] * 2
