"""Tensors found in whatever a forward returns, and the parameters that a backward from them would reach."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allstep.ddp.unused import reached_parameters, tensors_in

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output:
    loss: torch.Tensor
    extras: list = field(default_factory=list)


@dataclass(frozen=True)
class Slotted:
    __slots__ = ("loss",)
    loss: torch.Tensor


class Holder:
    """A plain object, such as a model library's output class."""

    def __init__(self, value):
        self.value = value
        self.myself = self


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


T = torch.ones(1)


@pytest.mark.parametrize(
    "value",
    [
        T,
        [T],
        (None, ("text", [T])),
        {"a": {"b": T}},
        UserDict(a=T),
        OrderedDict(a=[T]),
        {T},
        Pair(1, T),
        Output(T),
        Output(None, [{"deep": T}]),
        Slotted(T),
        SimpleNamespace(x=T),
        Holder([T]),
        [Holder(Output(None, [Pair(0, (T,))]))],
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_tensor_is_found_wherever_it_is(value):
    assert [id(tensor) for tensor in tensors_in(value)] == [id(T)]


@pytest.mark.parametrize("value", [None, 3, "text", b"bytes", Output, nn.Linear(2, 2), {}, [], object()], ids=str)
def test_what_holds_no_output_gives_none(value):
    assert list(tensors_in(value)) == []


def test_structures_that_hold_themselves_end():
    loop = [T]
    loop.append(loop)
    assert len(list(tensors_in(loop))) == 1


def test_tensors_come_in_the_order_in_which_they_stand():
    tensors = [torch.tensor(float(index)) for index in range(6)]
    value = {"a": tensors[0], "b": [tensors[1], (tensors[2],)], "c": Output(tensors[3], [tensors[4]]), "d": tensors[5]}
    assert [float(tensor) for tensor in tensors_in(value)] == [0, 1, 2, 3, 4, 5]


def reached(model, outputs):
    ids = reached_parameters(outputs)
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def test_only_parameters_behind_the_outputs_are_reached():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    x = torch.ones(1, 2)
    assert reached(model, {"out": Output(model["a"](x), [model["b"](x)])}) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert reached(model, model["a"](x).detach()) == set()


def test_a_parameter_that_is_shared_or_returned_as_it_is_counts():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert reached(model, model["b"](torch.ones(1, 2))) == {"a.weight", "b.bias"}
    assert reached(model, model["a"].bias) == {"a.bias"}


def test_frozen_parameters_are_not_reached_but_what_lies_behind_them_is():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    assert reached(model, model(torch.ones(1, 2))) == {"0.weight", "0.bias"}


def test_functions_views_and_checkpoints_are_walked_through():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    out = checkpoint(model[1], Doubled.apply(model[0](x)).view(2)[None], use_reentrant=False)
    assert reached(model, out) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_deep_graph_does_not_overflow_the_stack():
    weight = nn.Parameter(torch.ones(1))
    x = weight
    for _ in range(20_000):
        x = x + 1
    assert reached_parameters(x) == {id(weight)}


def test_walking_leaves_the_graph_usable():
    weight = nn.Parameter(torch.ones(2))
    loss = (weight * 3).sum()
    reached_parameters(loss)
    loss.backward()
    assert weight.grad.tolist() == [3, 3]
