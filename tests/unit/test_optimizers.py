"""Optimizers: which parameters decay, in which order, and which torch class does it."""

from typing import Any

import pytest
import torch
from torch import nn

from allstep._arguments.choices import OPTIMIZERS
from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError
from allstep.trainer.optimizers import make_optimizer, split_by_decay


class OwnRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.modulation = nn.Linear(4, 4, bias=False)  # inside a norm, but no norm itself


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.relative_bias = nn.Parameter(torch.zeros(3, 3))
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((2, 4)), nn.BatchNorm2d(3), OwnRMSNorm())
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight  # tied


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def test_biases_norms_and_vectors_do_not_decay_and_frozen_ones_are_left_out() -> None:
    model = Model()
    optimizer = make_optimizer(model, TrainingArguments(weight_decay=0.1))
    assert group_names(model, optimizer) == [
        ["embedding.weight", "block.0.weight", "block.3.modulation.weight"],
        [
            *("relative_bias", "scale", "block.0.bias", "block.1.weight", "block.1.bias"),
            *("block.2.weight", "block.2.bias", "block.3.weight"),
        ],
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_names_come_with_the_parameters_in_registration_order() -> None:
    model = Model()
    decayed, others = split_by_decay(model)
    order = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sorted([*decayed, *others], key=order.index) == order
    assert list(decayed) == [name for name in order if name in decayed]
    assert decayed["embedding.weight"] is model.embedding.weight


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ("adamw_torch_fused", torch.optim.AdamW),
        ("adamw_torch", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("adagrad", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
    ],
)
def test_each_name_makes_its_optimizer_and_takes_a_step(optim: str, expected: type) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = make_optimizer(model, TrainingArguments(optim=optim, learning_rate=0.1))
    assert type(optimizer) is expected
    assert all(group["lr"] == 0.1 for group in optimizer.param_groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_names_are_those_that_the_arguments_accept() -> None:
    for optim in OPTIMIZERS:
        make_optimizer(nn.Linear(2, 2), TrainingArguments(optim=optim))
    args = TrainingArguments()
    args.optim = "lion"  # set later, so not checked
    with pytest.raises(ArgumentsError, match=f"optim='lion': expected one of {', '.join(OPTIMIZERS)}"):
        make_optimizer(nn.Linear(2, 2), args)


def test_adamw_gets_its_settings_and_equals_torch_step_by_step() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    args = TrainingArguments(
        optim="adamw_torch", learning_rate=0.1, weight_decay=0.2, adam_beta1=0.5, adam_beta2=0.6, adam_epsilon=1e-3
    )
    optimizer = make_optimizer(model, args)
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-3}
    reference = torch.optim.AdamW(
        [{"params": [twin.weight], "weight_decay": 0.2}, {"params": [twin.bias], "weight_decay": 0.0}], **settings
    )
    for _ in range(3):
        for each, stepper in ((model, optimizer), (twin, reference)):
            stepper.zero_grad()
            each(torch.ones(1, 3)).square().sum().backward()
            stepper.step()
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.bias, twin.bias)


def test_fused_where_the_device_has_it_and_plain_elsewhere() -> None:
    fused = make_optimizer(nn.Linear(2, 2), TrainingArguments())
    assert [group["fused"] for group in fused.param_groups] == [True, True]
    plain = make_optimizer(nn.Linear(2, 2, device="meta"), TrainingArguments())
    assert [group["fused"] for group in plain.param_groups] == [None, None]


def test_whole_numbers_as_betas_are_accepted() -> None:
    optimizer = make_optimizer(nn.Linear(2, 2), TrainingArguments(adam_beta1=0, adam_beta2=0.5))
    assert optimizer.param_groups[0]["betas"] == (0.0, 0.5)


def test_a_model_without_trainable_parameters_is_refused_in_words() -> None:
    with pytest.raises(ArgumentsError, match=r"Linear has no trainable parameter: found 2, all with requires_grad=False"):
        make_optimizer(nn.Linear(2, 2).requires_grad_(False), TrainingArguments())
    with pytest.raises(ArgumentsError, match="ReLU has no parameter: expected at least one"):
        make_optimizer(nn.ReLU(), TrainingArguments())
