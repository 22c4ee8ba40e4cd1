"""`check_consistency` names what drifted apart, on every rank; a no_sync without effect says so once."""

import warnings

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel


def trained(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def drift(rank, size, what):
    model, optimizer = trained(rank)
    if rank == 1:
        with torch.no_grad():
            if what == "parameter":
                model.module[2].weight[0, 1] += 1e-6
            elif what == "buffer":
                model.module[1].running_var[0] *= 1.001
            elif what == "optimizer":
                optimizer.state[model.module[0].bias]["exp_avg"][0] += 1e-6
            elif what == "loaded on one rank":
                model.module.load_state_dict({k: torch.zeros_like(v) for k, v in model.module.state_dict().items()})
    try:
        model.check_consistency(optimizer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("parameter", ["parameter 2.weight on rank(s) 1"]),
        ("buffer", ["buffer 1.running_var on rank(s) 1"]),
        ("optimizer", ["optimizer state exp_avg of 0.bias on rank(s) 1"]),
        ("loaded on one rank", ["parameter 0.weight on rank(s) 1", "6 of 6 differ"]),
        ("nothing", []),
    ],
)
def test_the_first_thing_that_differs_is_named_on_every_rank(ranks, what, words):
    for message in ranks.run(drift, what):
        if not words:
            assert message is None
        for word in words:
            assert word in message


def no_effect(rank, size):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            out = model(torch.full((2, 3), rank + 1.0))
            with model.no_sync():
                out.sum().backward()
    gradient = model.module.weight.grad.clone()
    with warnings.catch_warnings(record=True) as quiet:
        warnings.simplefilter("always")
        with model.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        model(torch.ones(2, 3)).sum().backward()
    return [str(w.message) for w in caught], gradient, [str(w.message) for w in quiet]


def test_no_sync_around_backward_alone_reduces_as_torch_does_and_says_so_once(ranks):
    (first, gradient, quiet), (second, other, _) = ranks.run(no_effect)
    assert len(first) == len(second) == 1
    assert "Put the forward inside" in first[0]
    assert torch.equal(gradient, other)
    assert torch.equal(gradient, torch.full((2, 3), 6.0))
    assert quiet == []


def inner(rank, size):
    """Training through the module inside the wrapper, as `model.module.loss(...)` does."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.module(torch.full((2, 3), rank + 1.0)).sum().backward()
    return model.module.weight.grad.clone()


def test_training_through_the_inner_module_is_reduced_too(ranks):
    first, second = ranks.run(inner)
    assert torch.equal(first, second)
    assert torch.equal(first, torch.full((2, 3), 3.0))
