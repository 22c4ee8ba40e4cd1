"""Optimizers that step inside a backward step with the mean over ranks, as those after it do."""

import warnings

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, which torch itself calls there
    from torch.distributed.optim import _apply_optimizer_in_backward


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * number + rank))


SETTINGS = {"lr": 0.1, "momentum": 0.9}


def train(rank, size, options, before_wrapping, accumulate, uneven):
    net = make()
    if before_wrapping:
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), SETTINGS)
    model = DistributedDataParallel(net, **options)
    if not before_wrapping:
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), SETTINGS)
    with model.join():
        for step in range(3 + (uneven and rank == 0)):
            if accumulate:
                with model.no_sync():
                    model(batch(rank, step + 20)).square().mean().backward()
            model(batch(rank, step)).square().mean().backward()
            assert all(parameter.grad is None for parameter in net.parameters())
    return [parameter.detach().clone() for parameter in net.parameters()]


def reference(accumulate, uneven):
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), **SETTINGS)
    for step in range(3 + uneven):
        for rank in range(2 if step < 3 else 1):
            for number in (step + 20, step) if accumulate else (step,):
                (net(batch(rank, number)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"bucket_cap_mb": 1e-5}], ids=str)
@pytest.mark.parametrize("before_wrapping", [True, False])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
def test_they_step_with_the_mean_once_a_window(ranks, options, before_wrapping, accumulate, uneven):
    """Made before or after wrapping; also where one rank has a batch more than the other."""
    first, second = ranks.run(train, options, before_wrapping, accumulate, uneven)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(first, reference(accumulate, uneven))


def fail(rank, size):
    """A layer without a gradient: nothing may have moved when the error comes."""
    net = nn.ModuleDict({"used": nn.Linear(4, 2), "left": nn.Linear(4, 2)})
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net["used"](x)

    before = [parameter.detach().clone() for parameter in net.parameters()]
    model = DistributedDataParallel(Whole())
    with pytest.raises(RuntimeError, match=r"net.left.weight"):
        model(batch(rank, 0)).sum().backward()
    return all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)) and rank < size


def test_an_error_comes_before_they_step(ranks):
    assert ranks.run(fail) == [True, True]
