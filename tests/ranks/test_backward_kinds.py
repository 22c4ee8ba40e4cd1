"""Every way in which people run a backward: values of one process, and never replicas that differ in silence."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allstep import DistributedDataParallel
from allstep.errors import UnusedParametersError


class Net(nn.Module):
    """Two heads on a trunk; `recompute` checkpoints the trunk, and runs it `times` times."""

    def __init__(self, recompute: bool = False, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
        self.recompute, self.times = recompute, times

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(self.times):
            x = checkpoint(self.trunk, x, use_reentrant=False) if self.recompute else self.trunk(x)
        return self.a(x), self.b(x)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


# Each runs one window of micro-batches and leaves the gradients in the model.


def plain(model, rank, step):
    a, b = model(batch(rank, step))
    (a.square().mean() + b.mean()).backward()


def retained(model, rank, step):
    a, b = model(batch(rank, step))
    loss = a.square().mean() + b.mean()
    loss.backward(retain_graph=True)
    loss.backward()


def one_after_the_other(model, rank, step):
    a, b = model(batch(rank, step))
    a.square().mean().backward(retain_graph=True)
    b.mean().backward()


def penalty(model, rank, step):
    """The norm of the gradient with respect to the inputs enters the loss."""
    x = batch(rank, step).requires_grad_()
    a, b = model(x)
    (gradient,) = torch.autograd.grad(a.sum(), x, create_graph=True)
    (a.square().mean() + b.mean() + gradient.square().sum()).backward()


def looked_at_first(model, rank, step):
    """Gradients of parameters are computed aside, as balancing of losses does, before the backward."""
    a, b = model(batch(rank, step))
    weights = [p for name, p in model.named_parameters() if "trunk.0" in name]
    torch.autograd.grad(a.sum(), weights, retain_graph=True)
    (a.square().mean() + b.mean()).backward()


def two_forwards(model, rank, step):
    a, _ = model(batch(rank, step))
    _, b = model(batch(rank, step + 50))
    (a.square().mean() + b.mean()).backward()


def two_forwards_two_backwards(model, rank, step):
    a, b = model(batch(rank, step))
    c, d = model(batch(rank, step + 50))
    (a.square().mean() + b.mean()).backward()
    (c + d).square().mean().backward()


def with_an_outer_layer(model, rank, step):
    """What comes behind the wrapper is trained on its own."""
    torch.manual_seed(step)
    outer = nn.Linear(2, 1)
    a, b = model(batch(rank, step))
    outer(torch.cat([a, b], 1)).square().mean().backward()


def second_order(model, rank, step):
    a, b = model(batch(rank, step))
    (a.square().mean() + b.mean()).backward(create_graph=True)
    for p in model.parameters():
        p.grad = p.grad.detach()


KINDS = {
    f.__name__: f
    for f in (
        plain,
        retained,
        one_after_the_other,
        penalty,
        looked_at_first,
        two_forwards,
        two_forwards_two_backwards,
        with_an_outer_layer,
        second_order,
    )
}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def run(rank, size, kind, model_options, options):
    net = Net(**model_options)
    model = DistributedDataParallel(net, **options)
    seen = []
    for step in range(3):
        KINDS[kind](model, rank, step)
        seen.append(gradients(net))
        model.zero_grad(set_to_none=step % 2 == 0)
    return seen


def reference(kind, model_options, step):
    found = []
    for rank in range(2):
        model = Net(**model_options)
        KINDS[kind](model, rank, step)
        found.append(gradients(model))
    return {name: (found[0][name] + found[1][name]) / 2 for name in found[0]}


FLAGS = {"strict": False, "walk": True, "none": None}
CASES = [(kind, flag) for kind in sorted(KINDS) for flag in FLAGS if (kind, flag) != ("one_after_the_other", "strict")]


@pytest.mark.parametrize("model_options", [{}, {"recompute": True, "times": 2}], ids=["once", "recomputed twice"])
@pytest.mark.parametrize(("kind", "flag"), CASES)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_are_the_mean_of_those_of_one_process(ranks, kind, flag, model_options):
    options = {"find_unused_parameters": FLAGS[flag], "bucket_cap_mb": 1e-5}
    results = ranks.run(quietly, kind, model_options, options)
    for step in range(3):
        expected = reference(kind, model_options, step)
        for name, value in expected.items():
            assert torch.equal(results[0][step][name], results[1][step][name]), name
            torch.testing.assert_close(results[0][step][name], value, rtol=1e-5, atol=1e-6)


def strict_and_in_parts(rank, size):
    model = DistributedDataParallel(Net())
    try:
        one_after_the_other(model, rank, 0)
    except UnusedParametersError as error:
        return str(error)
    return None


def test_with_the_flag_off_a_backward_of_one_output_alone_says_what_is_missing(ranks):
    for message in ranks.run(strict_and_in_parts):
        assert message is not None
        assert "b.weight, b.bias" in message
        assert "the outputs that use them did not enter the loss" in message


def quietly(*arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(*arguments)


def without_backward(rank, size):
    """Only looks at gradients of inputs, in a forward that no backward follows."""
    model = DistributedDataParallel(Net())
    x = batch(rank, 0).requires_grad_()
    torch.autograd.grad(model(x)[0].sum(), x)
    reductions = model.reductions
    plain(model, rank, 1)
    return reductions, model.reductions, gradients(model.module)


def test_looking_at_gradients_of_inputs_reduces_nothing(ranks):
    first, second = ranks.run(without_backward)
    assert first[:2] == second[:2] == (0, 1)
    expected = reference("plain", {}, 1)
    for name, value in expected.items():
        torch.testing.assert_close(first[2][name], value, rtol=1e-5, atol=1e-6)


def returns_a_parameter(rank, size):
    """A model whose output is a parameter, as the temperature of contrastive models is."""

    class Scaled(Net):
        def forward(self, x):
            return (*super().forward(x), self.a.bias)

    model = DistributedDataParallel(Scaled())
    for step in range(5):
        a, b, scale = model(batch(rank, step))
        (a.square().mean() + b.mean() + scale.sum()).backward()
    return len(model.module.a.bias._backward_hooks or ()), gradients(model.module)


def test_a_parameter_that_is_an_output_gathers_no_hooks(ranks):
    (hooks, first), (_, second) = ranks.run(returns_a_parameter)
    assert hooks == 0
    assert all(torch.equal(first[name], second[name]) for name in first)
