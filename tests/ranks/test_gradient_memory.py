"""Whatever a loop does with gradients and their memory, the next reduction is right, and what it kept is still what it was."""

import copy
import io
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks

BACKENDS = ("gloo", "shm")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).mean((2, 3)).tanh())


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = batch(rank, step).to(next(model.parameters()).dtype)
    return model(x).square().mean()


def parameters(net):
    return list(net.parameters())


KEPT = {
    "the tensors": lambda net: [p.grad for p in parameters(net)],
    "flat pieces of them": lambda net: [p.grad.view(-1)[:2] for p in parameters(net)],
    "one": lambda net: [parameters(net)[1].grad],
    "detached": lambda net: [p.grad.detach() for p in parameters(net)],
    "in a closure": lambda net: [p.grad for p in parameters(net)[::-1]],
}


def keep(rank, size, what, options, accumulate):
    """Gradients of two losses, each kept as it was when the next one came."""
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-4, **options)
    kept, copies = [], []
    for step in range(4):
        if accumulate:
            with model.no_sync():
                loss(model, rank, step + 20).backward()
        loss(model, rank, step).backward()
        kept.append(KEPT[what](net))
        copies.append(copy.deepcopy([gradient.clone() for gradient in kept[-1]]))
        found = gradients_of(net)
        model.zero_grad()
    return kept, copies, found


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "windows"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": None}, {"gradient_as_bucket_view": False}], ids=str)
@pytest.mark.parametrize("what", KEPT)
def test_gradients_that_a_loop_keeps_are_not_written_over(ranks, what, options, accumulate):
    """As gradient surgery over several tasks does: keep `.grad`, zero, and run the next backward."""
    results = ranks.run(keep, what, options, accumulate)
    for kept, copies, _ in results:
        assert all(torch.equal(a, b) for one, other in zip(kept, copies, strict=True) for a, b in zip(one, other, strict=True))

    def run(rank: int) -> nn.Module:
        net = Net()
        for number in (23, 3) if accumulate else (3,):
            loss(net, rank, number).backward()
        return net

    assert_mean([found for *_, found in results], mean_of_ranks(2, run))


def to_float64(net, rank):
    net.double()


def through_float64(net, rank):
    net.double()
    net.float()


def one_layer(net, rank):
    net.second.to(torch.float64)
    net.second.to(torch.float32)


def channels_last(net, rank):
    net.to(memory_format=torch.channels_last)


def other_data(net, rank):
    for p in net.parameters():
        p.data = p.data.clone()


def other_gradient_data(net, rank):
    for p in net.parameters():
        if p.grad is not None:
            p.grad.data = p.grad.data.clone()


def detach_gradients(net, rank):
    for p in net.parameters():
        if p.grad is not None:
            p.grad.detach_()


def share_gradients(net, rank):
    for p in net.parameters():
        if p.grad is not None:
            p.grad.share_memory_()


def share_model(net, rank):
    net.share_memory()


def send_gradients(net, rank):
    for p in net.parameters():
        if p.grad is not None:
            ForkingPickler(io.BytesIO()).dump(p.grad)


def on_one_rank_only(net, rank):
    if rank:
        other_gradient_data(net, rank)


def in_place(net, rank):
    for p in net.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
            p.grad *= 2


CHANGES = [
    to_float64,
    through_float64,
    one_layer,
    channels_last,
    other_data,
    other_gradient_data,
    detach_gradients,
    share_gradients,
    share_model,
    send_gradients,
    on_one_rank_only,
    in_place,
]


def change(rank, size, how, options, set_to_none):
    """Before step 2 the memory of parameters or gradients changes; gradients are zeroed before or after it."""
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-4, **options)
    found = []
    for step in range(4):
        loss(model, rank, step).backward()
        found.append({name: gradient.float() for name, gradient in gradients_of(net).items()})
        if set_to_none is not None:
            model.zero_grad(set_to_none=set_to_none)
        if step == 1:
            CHANGES[how](net, rank)
    return found


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=["views", "copies"])
@pytest.mark.parametrize("set_to_none", [True, False, None], ids=["None", "zeros", "kept"])
@pytest.mark.parametrize("how", range(len(CHANGES)), ids=[change.__name__ for change in CHANGES])
def test_memory_may_change_under_gradients_and_parameters(ranks, how, set_to_none, options):
    """Other dtypes, orders and places; `.data` replaced; gradients detached, shared between processes, edited in place."""
    results = ranks.run(change, how, options, set_to_none)
    for step in range(4):

        def run(rank: int, step: int = step) -> nn.Module:
            net = Net()
            for each in range(step + 1) if set_to_none is None else (step,):
                loss(net, rank, each).backward()
            return net

        expected = mean_of_ranks(2, run)
        assert_mean([found[step] for found in results], expected, rtol=1e-4, atol=1e-5)


def _step(rank: int, step: int) -> nn.Module:
    net = Net()
    loss(net, rank, step).backward()
    return net


def hooked(rank, size, before_wrapping, options):
    """A hook that halves each gradient as soon as it has come."""
    net = Net()
    if not before_wrapping:
        model = DistributedDataParallel(net, **options)
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    if before_wrapping:
        model = DistributedDataParallel(net, **options)
    for step in range(3):
        model.zero_grad()
        loss(model, rank, step).backward()
    return gradients_of(net)


def _halve(parameter):
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"bucket_cap_mb": 1e-5}], ids=str)
@pytest.mark.parametrize("before_wrapping", [True, False])
def test_hooks_of_others_see_a_gradient_before_it_is_reduced(ranks, before_wrapping, options):
    """As with torch's class: what they change is what is averaged, whether they are registered before or after wrapping."""
    expected = mean_of_ranks(2, lambda rank: _step(rank, 2))
    halved = {name: gradient / 2 for name, gradient in expected.items()}
    assert_mean(ranks.run(hooked, before_wrapping, options), halved)


def taken(rank, size):
    net = Net()
    model = DistributedDataParallel(net)
    for p in net.second.parameters():
        p.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with pytest.raises(RuntimeError) as raised:
        loss(model, rank, 0).backward()
    return str(raised.value)


def test_gradients_that_a_hook_takes_away_are_missed_by_name(ranks):
    for word in ranks.run(taken):
        assert "the gradients of second.weight, second.bias came in this backward and were gone" in word or (
            "second.bias, second.weight" in word
        )


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if both else 0)


def set_to_none(rank, size, takes_away, flag):
    """A window whose first part uses a layer; some ranks then take that gradient away; the last part does not use it."""
    net = Optional()
    model = DistributedDataParallel(net, find_unused_parameters=flag)
    with model.no_sync():
        model(torch.full((1, 4), rank + 1.0), True).sum().backward()
    for parameter in net.sometimes.parameters() if rank in takes_away else ():
        parameter.grad = None
    model(torch.full((1, 4), rank + 1.0), False).sum().backward()
    return gradients_of(net)


@pytest.mark.parametrize("flag", [True, None])
@pytest.mark.parametrize("takes_away", [[0, 1], [1]], ids=["all", "one"])
def test_a_gradient_that_the_loop_takes_away_between_backwards_counts_as_none(ranks, takes_away, flag):
    first, second = ranks.run(set_to_none, takes_away, flag)
    expected = None if takes_away == [0, 1] else torch.full((2, 4), 0.5)  # rank 0's ones and no gradient of rank 1
    assert_mean([{"weight": each["sometimes.weight"]} for each in (first, second)], {"weight": expected})
    assert_mean([{"weight": each["always.weight"]} for each in (first, second)], {"weight": torch.full((2, 4), 3.0)})
