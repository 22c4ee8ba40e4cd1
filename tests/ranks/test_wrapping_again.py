"""A module can be wrapped again: the wrapper before lets go of it, whether it was dropped or released."""

import gc

import torch
from torch import nn

from allstep import DistributedDataParallel


def rewrapped(rank, size, released):
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    first = DistributedDataParallel(module)
    first(torch.full((1, 3), float(rank + 1))).sum().backward()
    if released:
        first.release()
    else:
        del first
        gc.collect()
    module.zero_grad()
    module(torch.full((1, 3), float(rank + 1))).sum().backward()
    local = module.weight.grad.clone()  # nobody reduces it now
    module.zero_grad()
    second = DistributedDataParallel(module)
    second(torch.full((1, 3), float(rank + 1))).sum().backward()
    return local, module.weight.grad.clone(), second.reductions


def test_a_dropped_wrapper_reduces_no_more(ranks):
    check(ranks.run(rewrapped, False))


def test_a_released_wrapper_reduces_no_more(ranks):
    check(ranks.run(rewrapped, True))


def check(results):
    for rank, (local, reduced, reductions) in enumerate(results):
        assert torch.equal(local, torch.full((2, 3), rank + 1.0))
        assert torch.equal(reduced, torch.full((2, 3), 1.5))
        assert reductions == 1
