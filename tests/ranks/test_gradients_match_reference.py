"""Gradients on two ranks are the mean over ranks: equal to torch's class bit for bit, and to one process on the whole batch."""

import copy

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel

BACKENDS = ("gloo", "shm")


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=g), torch.randn(5, 3, generator=g)


def train(rank, size, wrapper, options, steps, accumulate, set_to_none):
    model = wrapper(make_model(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        for micro in range(accumulate):
            x, y = batch(rank, step * accumulate + micro)
            if micro < accumulate - 1:
                with model.no_sync():
                    nn.functional.mse_loss(model(x), y).backward()
            else:
                nn.functional.mse_loss(model(x), y).backward()
        seen.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return seen, [p.detach().clone() for p in model.parameters()]


def both(rank, size, options, accumulate, set_to_none):
    ours = train(rank, size, DistributedDataParallel, options, 3, accumulate, set_to_none)
    theirs = train(rank, size, nn.parallel.DistributedDataParallel, {}, 3, accumulate, set_to_none)
    return ours, theirs


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}]
)
def test_gradients_and_weights_equal_torch_bit_for_bit(ranks, options, accumulate, set_to_none):
    results = ranks.run(both, options, accumulate, set_to_none)
    for (ours_gradients, ours_weights), (their_gradients, their_weights) in results:
        for ours, theirs in zip(ours_gradients, their_gradients, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ours_weights, their_weights, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0][1], results[1][0][1], strict=True))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_weights_equal_one_process_on_the_whole_batch(ranks, accumulate):
    weights = ranks.run(train, DistributedDataParallel, {}, 3, accumulate, True)[0][1]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for micro in range(accumulate):
            pairs = [batch(rank, step * accumulate + micro) for rank in range(2)]
            x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, reference in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(ours, reference.detach(), rtol=1e-6, atol=1e-6)


def weighted(rank, size):
    """Rank 0 has six samples, rank 1 two; then rank 1 has none at all."""
    model = DistributedDataParallel(make_model())
    gradients = []
    for counts in [(6, 2), (5, 0)]:
        count = counts[rank]
        x, y = (t[:count] for t in whole_batch())
        if rank == 1:
            x, y = (t[counts[0] : sum(counts)] for t in whole_batch())
        if count:
            loss = nn.functional.mse_loss(model(x), y)
            model.weigh(count, float(loss.detach()) * count)
            (loss * count).backward()
        else:
            model.take_part(weight=0.0)
        gradients.append([p.grad.clone() for p in model.parameters()])
        gradients[-1].append(model.totals.carried / model.totals.weight)
        model.zero_grad()
    return gradients


def whole_batch():
    g = torch.Generator().manual_seed(3)
    return torch.randn(8, 6, generator=g), torch.randn(8, 3, generator=g)


def test_unequal_batches_weigh_by_samples_and_an_empty_rank_takes_part(ranks):
    results = ranks.run(weighted)
    for index, count in enumerate([8, 5]):
        model = copy.deepcopy(make_model())
        x, y = (t[:count] for t in whole_batch())
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        reference = [*(p.grad for p in model.parameters()), loss.detach()]
        for rank in range(2):
            for ours, expected in zip(results[rank][index], reference, strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
        assert all(torch.equal(a, b) for a, b in zip(results[0][index], results[1][index], strict=True))
