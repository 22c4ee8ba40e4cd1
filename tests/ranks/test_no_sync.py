"""no_sync: gradients stay on their rank until the first forward after it, however the contexts are nested or left."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from allstep import DistributedDataParallel

BACKENDS = ("gloo", "shm")


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(x).square().mean()


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def reference(numbers_of_rank: list[list[int]], divide_by: int = 2) -> torch.Tensor:
    """The sum over ranks of the gradients of these micro-batches, divided."""
    model = make_model()
    for rank, numbers in enumerate(numbers_of_rank):
        for number in numbers:
            loss(model, rank, number).backward()
    return gradient(model) / divide_by


def close(one: torch.Tensor, two: torch.Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def nested(rank, size):
    model = DistributedDataParallel(make_model())
    with model.no_sync():
        loss(model, rank, 0).backward()
        with model.no_sync():
            loss(model, rank, 1).backward()
        loss(model, rank, 2).backward()
    assert model.reductions == 0
    local = gradient(model)
    loss(model, rank, 3).backward()
    return local, gradient(model), model.reductions, model.collectives_per_bucket


def test_leaving_an_inner_context_does_not_end_the_outer(ranks):
    results = ranks.run(nested)
    for rank, (local, reduced, reductions, collectives) in enumerate(results):
        close(local, reference([[0, 1, 2] if r == rank else [] for r in range(2)], 1))
        close(reduced, reference([[0, 1, 2, 3]] * 2))
        assert reductions == 1
        assert set(collectives) == {1}


def broken_off(rank, size):
    model = DistributedDataParallel(make_model())
    with suppress(ZeroDivisionError), model.no_sync():
        loss(model, rank, 0).backward()
        raise ZeroDivisionError
    flag = model.require_backward_grad_sync
    loss(model, rank, 1).backward()
    return flag, gradient(model)


def test_an_exception_inside_ends_the_context_and_keeps_what_was_accumulated(ranks):
    for flag, reduced in ranks.run(broken_off):
        assert flag is True
        close(reduced, reference([[0, 1]] * 2))


def unequal(rank, size):
    """Rank 0 accumulates three micro-batches, rank 1 one."""
    model = DistributedDataParallel(make_model())
    with model.no_sync():
        for number in range(2 if rank == 0 else 0):
            loss(model, rank, number).backward()
    loss(model, rank, 2).backward()
    return gradient(model)


def test_ranks_may_accumulate_different_numbers_of_micro_batches(ranks):
    for reduced in ranks.run(unequal):
        close(reduced, reference([[0, 1, 2], [2]]))


def accumulated_only(rank, size):
    model = DistributedDataParallel(make_model())
    for number in range(3):
        with model.no_sync():
            loss(model, rank, number).backward()
    local = gradient(model)
    model.take_part()
    return local, gradient(model)


def test_what_was_accumulated_can_be_reduced_without_a_backward(ranks):
    for rank, (local, reduced) in enumerate(ranks.run(accumulated_only)):
        close(local, reference([range(3) if r == rank else [] for r in range(2)], 1))
        close(reduced, reference([range(3)] * 2))


def outside_inside(rank, size, wrapper, order):
    """Letters of `order`: S a forward that is reduced, N one under no_sync, digits the backward of that forward, C as 0 but in
    a context."""
    model = wrapper(make_model())
    losses = []
    seen = []
    for letter in order:
        if letter == "S":
            losses.append(loss(model, rank, len(losses)))
        elif letter == "N":
            with model.no_sync():
                losses.append(loss(model, rank, len(losses)))
        elif letter == "C":
            with model.no_sync():
                losses[0].backward()
        else:
            losses[int(letter)].backward()
        if letter not in "SN":
            seen.append(gradient(model))
    return seen


@pytest.mark.parametrize(
    "order",
    [
        "SC",  # the context around the backward only: no effect, as in torch
        "N0",  # around the forward only: not reduced
        "N0S1",
        "NCS1",
        "SN0",  # the last forward ran under no_sync, the backward is that of one that did not
        "N0S1N2S3",
        "SCS1",
    ],
)
def test_the_context_counts_at_forward_time_as_in_torch(ranks, order):
    ours = ranks.run(outside_inside, DistributedDataParallel, order)
    theirs = ranks.run(outside_inside, nn.parallel.DistributedDataParallel, order)
    for own, other in zip(ours, theirs, strict=True):
        for one, two in zip(own, other, strict=True):
            close(one, two)


def many_windows(rank, size):
    model = DistributedDataParallel(make_model(), bucket_cap_mb=1e-5)
    for _ in range(3):
        for number in range(4):
            if number < 3:
                with model.no_sync():
                    loss(model, rank, number).backward()
            else:
                loss(model, rank, number).backward()
        model.zero_grad()
    return model.collectives_per_bucket


def test_each_bucket_is_reduced_once_a_window(ranks):
    for collectives in ranks.run(many_windows):
        assert len(collectives) > 1
        assert set(collectives) == {3}


def evaluated_within(rank, size):
    """A forward without gradients in the middle of a window changes nothing."""
    model = DistributedDataParallel(make_model())
    with model.no_sync():
        loss(model, rank, 0).backward()
    with torch.no_grad():
        loss(model, rank, 7)
    loss(model, rank, 1).backward()
    return gradient(model)


def test_a_forward_without_gradients_inside_a_window_changes_nothing(ranks):
    for reduced in ranks.run(evaluated_within):
        close(reduced, reference([[0, 1]] * 2))
