"""Wrappers that share parameters: each gradient is reduced once, whichever of them runs."""

import gc

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks

BACKENDS = ("gloo", "shm")


def make() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"body": nn.Linear(4, 4), "one": nn.Linear(4, 2), "two": nn.Linear(4, 3)})


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def summed(one, two, x):
    (one(x).square().mean() + two(x).square().mean()).backward()


def separate(one, two, x):
    one(x).square().mean().backward()
    two(x).square().mean().backward()


def first_only(one, two, x):
    one(x).square().mean().backward()


def in_turn(one, two, x):
    first, second = one(x), two(x)
    second.square().mean().backward()
    first.square().mean().backward()


WAYS = {way.__name__: way for way in (summed, separate, first_only, in_turn)}


def share(rank, size, way, options, accumulate):
    net = make()
    one = DistributedDataParallel(nn.Sequential(net["body"], net["one"]), bucket_cap_mb=1e-5, **options)
    two = DistributedDataParallel(nn.Sequential(net["body"], net["two"]), bucket_cap_mb=1e-5, **options)
    seen = []
    for step in range(4):
        if accumulate:
            with one.no_sync(), two.no_sync():
                WAYS[way](one, two, batch(rank, step + 20))
        WAYS[way](one, two, batch(rank, step))
        seen.append(gradients_of(net))
        net.zero_grad()
    return seen


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "windows"])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}, {"find_unused_parameters": None}],
    ids=str,
)
@pytest.mark.parametrize("way", WAYS)
def test_two_wrappers_may_have_a_part_in_common(ranks, way, options, accumulate):
    """A body with two heads, each wrapped with it; losses added, one after the other, one alone, or in the other order."""
    first, second = ranks.run(share, way, options, accumulate)
    for step in range(4):

        def run(rank: int, step: int = step) -> nn.Module:
            net = make()
            one, two = nn.Sequential(net["body"], net["one"]), nn.Sequential(net["body"], net["two"])
            for number in (step + 20, step) if accumulate else (step,):
                WAYS[way](one, two, batch(rank, number))
            return net

        assert_mean([first[step], second[step]], mean_of_ranks(2, run))


def again(rank, size, which):
    """A model wrapped a second time while the first wrapper lives, trained through either; then the newer one goes."""
    net = make()["body"]
    old = DistributedDataParallel(net)
    new = DistributedDataParallel(net)
    seen = []
    for step in range(3):
        (old if which == "old" else new)(batch(rank, step)).square().mean().backward()
        seen.append(gradients_of(net))
        net.zero_grad()
    del new
    gc.collect()
    old(batch(rank, 3)).square().mean().backward()
    seen.append(gradients_of(net))
    return seen


@pytest.mark.parametrize("which", ["old", "new"])
def test_a_model_may_be_wrapped_while_another_wrapper_lives(ranks, which):
    first, second = ranks.run(again, which)
    for step in range(4):

        def run(rank: int, step: int = step) -> nn.Module:
            net = make()["body"]
            net(batch(rank, step)).square().mean().backward()
            return net

        assert_mean([first[step], second[step]], mean_of_ranks(2, run))
