"""Our AdamW is torch's fused one, to the bit."""

import copy

import pytest
import torch
from torch import nn

from allstep.trainer.adamw import AdamW


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def groups(net, decay=0.0):
    """As the trainer makes them."""
    plain = [parameter for parameter in net.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in net.parameters() if parameter.ndim <= 1]
    return [{"params": plain, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def give_gradients(net, step):
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(net.parameters()):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if (number + step) % 4 == 0 else gradient


def trained(kind, steps=6, decay=0.0, dtype=torch.float32, prepare=None, **options):
    net = model(dtype)
    optimizer = kind(groups(net, decay), lr=1e-2, fused=True, **options)
    if prepare is not None:
        prepare(optimizer)
    for step in range(steps):
        give_gradients(net, step)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return net, optimizer


def assert_same(ours, theirs):
    (net, optimizer), (other_net, other) = ours, theirs
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other_net.parameters(), strict=True))
    own, expected = optimizer.state_dict(), other.state_dict()
    assert own["param_groups"] == expected["param_groups"]
    assert own["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        assert own["state"][index].keys() == values.keys()
        assert all(torch.equal(own["state"][index][name], value) for name, value in values.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_those_of_torch_where_some_parameters_have_no_gradient(decay, dtype):
    assert_same(trained(AdamW, decay=decay, dtype=dtype), trained(torch.optim.AdamW, decay=decay, dtype=dtype))


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"betas": (0.8, 0.95), "eps": 1e-5}], ids=str)
def test_options_mean_what_they_mean_in_torch(options):
    assert_same(trained(AdamW, **options), trained(torch.optim.AdamW, **options))


def test_groups_with_numbers_of_their_own_are_moved_by_them():
    def apart(optimizer):
        optimizer.param_groups[1]["lr"] = 1e-4
        optimizer.param_groups[0]["betas"] = (0.5, 0.6)

    assert_same(trained(AdamW, prepare=apart), trained(torch.optim.AdamW, prepare=apart))


def test_a_rate_that_is_a_tensor_is_left_to_torch():
    def tensors(optimizer):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.01)

    assert_same(trained(AdamW, prepare=tensors), trained(torch.optim.AdamW, prepare=tensors))


def test_parameters_of_two_dtypes_in_a_group():
    def run(kind):
        torch.manual_seed(0)
        net = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()])
        optimizer = kind(net.parameters(), lr=1e-2, fused=True)
        for step in range(4):
            give_gradients(net, step)
            optimizer.step()
        return net, optimizer

    assert_same(run(AdamW), run(torch.optim.AdamW))


@pytest.mark.parametrize(("first", "second"), [(AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)])
@pytest.mark.parametrize("fused", [True, None])
def test_a_state_goes_from_one_to_the_other(first, second, fused):
    def run(before, after):
        net = model()
        optimizer = before(groups(net), lr=1e-2, fused=fused)
        give_gradients(net, 0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = after(groups(net), lr=1e-2, fused=True)
        optimizer.load_state_dict(saved)
        for step in range(1, 4):
            give_gradients(net, step)
            optimizer.step()
        return net, optimizer

    assert_same(run(first, second), run(torch.optim.AdamW, torch.optim.AdamW))


def test_what_hangs_onto_a_step_is_called_once_and_a_closure_is_run():
    _, optimizer = trained(AdamW, steps=2)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure():
        called.append(torch.is_grad_enabled())
        return 5.0

    assert optimizer.step(closure) == 5.0
    assert called == ["before", True, "after"]


def test_sparse_gradients_are_refused_as_by_torch():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = AdamW(table.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            optimizer.step()


def test_gradient_scaling_is_left_to_torch():
    def scaled(optimizer):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)

    assert_same(trained(AdamW, prepare=scaled), trained(torch.optim.AdamW, prepare=scaled))


def test_it_shows_itself_as_torch_does():
    assert isinstance(trained(AdamW, steps=0)[1], torch.optim.AdamW)
    assert repr(trained(AdamW, steps=0)[1]).startswith("AdamW (")
