"""Replicas are compared when they are wrapped: what differs is one error on every rank, what may differ becomes rank 0's."""

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel
from allstep.comm.agreement import digest


def base(rank: int = 0) -> nn.Sequential:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.setattr_later = nn.ModuleDict({name: nn.Linear(2, 2)})


def frozen(part: nn.Module) -> nn.Module:
    return part.requires_grad_(False)


def another_buffer(shape) -> nn.Module:
    model = base()
    model.register_buffer("mask", torch.zeros(shape))
    return model


def turned() -> nn.Module:
    """The same values, laid out in memory the other way round."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)


# name -> (model of rank 0, model of rank 1, what the message says of rank 0's, and of rank 1's)
PAIRS = {
    "shape": (base, lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)), "[2, 4]", "[5, 4]"),
    "dtype": (base, lambda: base().double(), "0.weight: float32", "0.weight: float64"),
    "name": (lambda: Named("a"), lambda: Named("b"), "later.a.weight", "later.b.weight"),
    "extra layer": (base, lambda: base().append(nn.Linear(2, 2)), "Rank 0 has 9 parameters", "3.weight"),
    "missing layer": (lambda: base().append(nn.Linear(2, 2)), base, "3.weight", "rank 1 has 9"),
    "frozen": (
        base,
        lambda: nn.Sequential(frozen(base()[0]), *base()[1:]),
        "0.weight: float32[4, 3],",
        "0.weight: float32[4, 3], frozen",
    ),
    "order": (
        lambda: nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)}),
        lambda: nn.ModuleDict({"b": nn.Linear(2, 1), "a": nn.Linear(2, 1)}),
        "a.weight",
        "b.weight",
    ),
    "buffer": (
        lambda: another_buffer((2,)),
        lambda: another_buffer((3,)),
        "mask: float32[2], buffer",
        "mask: float32[3], buffer",
    ),
    "missing buffer": (lambda: another_buffer((2,)), base, "Rank 0 has 10 parameters", "rank 1 has 9"),
    "strides": (
        lambda: turned().to(memory_format=torch.contiguous_format),
        turned,
        "0.weight: float32[4, 3, 3, 3],",
        "3] with strides [27, 1, 9, 3]",
    ),
    "shared": (base, lambda: shared(base()), "Rank 0 has 9 parameters", "3.bias"),
    "all frozen": (base, lambda: frozen(base()), "0.weight: float32[4, 3],", "0.weight: float32[4, 3], frozen"),
}


def shared(model: nn.Sequential) -> nn.Sequential:
    extra = nn.Linear(4, 2)
    extra.weight = model[2].weight
    model.insert(2, extra)
    return model


def wrap(rank, size, case):
    try:
        DistributedDataParallel(PAIRS[case][rank]())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("case", PAIRS)
def test_different_models_are_one_error_on_every_rank_with_both_sides(ranks, case):
    here, there = ranks.run(wrap, case)
    assert here == there
    assert here is not None
    assert here.startswith("ReplicaError: The ranks hold different models.")
    _, _, of_first, of_second = PAIRS[case]
    assert of_first in here
    assert of_second in here


def wrap_with_seed(rank, size):
    model = base(rank)
    model[1].running_mean += rank
    before = digest(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    named = [*wrapped.module.named_parameters(), *wrapped.module.named_buffers()]
    return before, digest(named), [p.requires_grad and p.is_leaf for p in wrapped.parameters()]


def test_different_seeds_become_rank_zeros_weights(ranks):
    (before, first, leaves), (other_before, second, other_leaves) = ranks.run(wrap_with_seed)
    assert before != other_before
    reference = base(0)
    assert first == second == digest([*reference.named_parameters(), *reference.named_buffers()])
    assert all(leaves)
    assert all(other_leaves)


def wrap_differently(rank, size, of_rank):
    try:
        model = DistributedDataParallel(base(), **of_rank[rank])
        model(torch.ones(3, 3)).sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    "of_rank",
    [
        [{"bucket_cap_mb": 1.0}, {"bucket_cap_mb": 1e-5}],
        [{"forward_sync_buffers": True}, {"forward_sync_buffers": False}],
    ],
    ids=["bucket_cap_mb", "forward_sync_buffers"],
)
def test_arguments_that_have_to_agree_are_compared_too(ranks, of_rank):
    here, there = ranks.run(wrap_differently, of_rank, timeout=30)
    assert here == there
    assert here is not None
    assert here.startswith("ReplicaError")
    for options in of_rank:
        ((name, value),) = options.items()
        assert f"{name}={value}" in here


def trains_after_an_error(rank, size):
    wrap(rank, size, "shape")
    model = DistributedDataParallel(base())
    model(torch.ones(3, 3)).sum().backward()
    return model.module[0].weight.grad.clone()


def test_after_the_error_the_group_is_still_of_use(ranks):
    one, two = ranks.run(trains_after_an_error)
    assert torch.equal(one, two)


def test_a_model_without_anything_to_train_is_refused_in_words():
    with pytest.raises(RuntimeError, match="Sequential has no parameter that requires a gradient"):
        DistributedDataParallel(frozen(base()))
