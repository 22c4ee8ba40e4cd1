"""Backward, clipping and dropping of gradients give the bits of torch's own functions."""

import math
import random

import pytest
import torch
from torch import nn

from allstep.trainer.optimization.gradients import _scale, backward, clip_gradients, drop_gradients


def parameters(dtypes=(torch.float32,), factor=1.0, seed=0):
    """Parameters with gradients, of several shapes; every fifth has none."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(10):
        shape = [(3, 5), (7,), (), (1, 2, 4)][number % 4]
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtypes[number % len(dtypes)]))
        if number % 5 != 4:
            parameter.grad = (factor * torch.randn(shape, generator=generator)).to(parameter.dtype)
        made.append(parameter)
    return made


def same(ours, theirs):
    return (ours is None and theirs is None) or torch.equal(torch.nan_to_num(ours, 7.0), torch.nan_to_num(theirs, 7.0))


@pytest.mark.parametrize("max_norm", [1.0, 0.3, 1e-6, 100.0])
@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e-20, 1e20, math.nan, math.inf])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.float64,), (torch.bfloat16,), (torch.float32, torch.bfloat16)], ids=str
)
def test_clipping_gives_the_bits_of_torch(dtypes, factor, max_norm):
    ours, theirs = parameters(dtypes, factor), parameters(dtypes, factor)
    norms = clip_gradients(ours, max_norm), nn.utils.clip_grad_norm_(theirs, max_norm)
    assert same(*norms)
    assert norms[0].dtype == norms[1].dtype
    assert norms[0].shape == norms[1].shape == ()
    assert all(same(own.grad, other.grad) for own, other in zip(ours, theirs, strict=True))


def test_clipping_really_scales():
    clipped = parameters()
    before = clip_gradients(clipped, 0.5)
    assert before > 0.5
    assert float(clip_gradients(clipped, 100.0)) == pytest.approx(0.5, rel=1e-5)


def test_without_any_gradient_the_norm_is_zero():
    assert clip_gradients([nn.Parameter(torch.ones(2))], 1.0) == 0.0


def test_sparse_gradients_are_left_to_torch():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(Exception, match=r"[Ss]parse"):
        nn.utils.clip_grad_norm_(list(table.parameters()), 1.0)
    with pytest.raises(Exception, match=r"[Ss]parse"):
        clip_gradients(list(table.parameters()), 1.0)


def test_the_scale_in_numbers_is_that_of_tensors():
    draw = random.Random(0)
    norms = [10 ** draw.uniform(-30, 30) for _ in range(4000)] + [1 - 1e-6 + i * 5e-9 for i in range(400)]
    for norm in [0.0, math.inf, math.nan, 1e-45, *norms]:
        tensor = torch.tensor(norm)
        for max_norm in (1.0, 0.1, 1e-6, 7.3, 1e30, 10 ** draw.uniform(-5, 5)):
            expected = torch.clamp(max_norm / (tensor + 1e-6), max=1.0).item()
            assert _scale(tensor.item(), max_norm) == expected or math.isnan(norm)
    assert math.isnan(_scale(math.nan, 1.0))


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_gives_the_gradients_of_the_weighted_loss(dtype, shape):
    def gradients(run):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)
        for weight in (3, 1021):  # accumulated
            run(model(torch.randn(4, 5, dtype=dtype)).square().mean().reshape(shape), weight)
        return [parameter.grad for parameter in model.parameters()]

    ours, theirs = gradients(backward), gradients(lambda loss, weight: (loss * weight).backward())
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))


def test_a_loss_without_gradients_is_the_error_that_torch_gives():
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(torch.tensor(1.0), 2)


def test_a_tensor_of_another_class_runs_its_own_backward():
    class Own(torch.Tensor):
        ran = False

        def backward(self, *args, **kwargs):
            Own.ran = True
            super().backward(*args, **kwargs)

    leaf = torch.ones((), requires_grad=True)
    backward((leaf * 3).as_subclass(Own), 2)
    assert Own.ran
    assert leaf.grad == 6


def test_dropping_leaves_no_gradient():
    held = parameters()
    drop_gradients(torch.optim.SGD([{"params": held[:3]}, {"params": held[3:]}], lr=0.1))
    assert all(parameter.grad is None for parameter in held)


def test_an_optimizer_with_a_way_of_its_own_drops_them_itself():
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            asked.append(set_to_none)

    asked = []
    drop_gradients(Own(parameters(), lr=0.1))
    replaced = torch.optim.SGD(parameters(), lr=0.1)
    replaced.zero_grad = lambda set_to_none=True: asked.append(set_to_none)
    drop_gradients(replaced)
    assert asked == [True, True]
