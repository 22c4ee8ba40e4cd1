"""Optimizers: which parameters decay, in which order, and which torch class does it."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from allstep._arguments.choices import OPTIMIZERS
from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError
from allstep.trainer.optimization.optimizer_classes import OPTIMIZER_KINDS
from allstep.trainer.optimization.optimizers import make_optimizer, optimizer_class_and_kwargs, resting, split_by_decay


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
    assert sorted(OPTIMIZERS) == sorted(OPTIMIZER_KINDS)
    args = TrainingArguments()
    args.optim = "adam"  # set later, so not checked
    with pytest.raises(ArgumentsError, match=f"optim='adam': expected one of {', '.join(OPTIMIZER_KINDS)}"):
        make_optimizer(nn.Linear(2, 2), args)


class Fake(torch.optim.SGD):
    """An optimizer of a library; keeps what it was made with."""

    def __init__(self, params: Any, lr: float, **settings: Any) -> None:
        super().__init__(params, lr=lr)
        self.settings, self.modes = settings, list[bool]()

    def train(self) -> None:
        self.modes.append(True)

    def eval(self) -> None:
        self.modes.append(False)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library's classes, so that names and settings can be compared where none of them is installed."""
    for kind in OPTIMIZER_KINDS.values():
        if kind.package not in ("torch", "transformers"):
            module = sys.modules.get(kind.module)
            if not isinstance(module, FakeLibrary):
                module = FakeLibrary(kind.module)
                monkeypatch.setitem(sys.modules, kind.module, module)
            setattr(module, kind.name, Fake)


class FakeLibrary(ModuleType):
    """A library that is not installed."""


BETAS = {"betas": (0.8, 0.9), "eps": 1e-3}
FREE = {"weight_decay": 0.1, "weight_lr_power": 2.0, "r": 0.0}
RMS = {"momentum": 0.9, "centered": True}


@pytest.mark.parametrize(
    ("optim", "optim_args", "expected"),
    [
        ("adamw_bnb_8bit", None, {**BETAS, "optim_bits": 8, "is_paged": False}),
        ("paged_adamw_32bit", None, {**BETAS, "optim_bits": 32, "is_paged": True}),
        ("lion_8bit", None, {"betas": (0.8, 0.9), "optim_bits": 8, "is_paged": False}),
        (
            "paged_ademamix_8bit",
            "beta3=0.5, t_alpha=7",
            {"betas": (0.8, 0.9, 0.5), "eps": 1e-3, "alpha": 5.0, "t_alpha": 7, "optim_bits": 8, "is_paged": True},
        ),
        ("rmsprop_bnb", "momentum=0.9,centered=true", {**RMS, "optim_bits": 32}),
        ("adamw_torch_4bit", "block_size=64", {**BETAS, "block_size": 64, "bf16_stochastic_round": False}),
        ("schedule_free_adamw", None, {**BETAS, **FREE, "warmup_steps": 5}),
        ("schedule_free_radam", "r=0.5", {**BETAS, **FREE, "r": 0.5}),
        ("schedule_free_sgd", None, {**FREE, "warmup_steps": 5}),
        ("grokadamw", "lamb=3", {"alpha_init": 0.98, "lamb": 3.0, "gamma": 0.1, "grokking_signal_decay_rate": 0.1}),
        ("stable_adamw", "kahan_sum=false", {**BETAS, "weight_decay": 0.1, "decouple_lr": False, "kahan_sum": False}),
    ],
)
def test_optimizers_of_libraries_get_their_settings(
    libraries: None, optim: str, optim_args: str | None, expected: dict[str, Any]
) -> None:
    args = TrainingArguments(adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3, weight_decay=0.1, warmup_steps=5)
    args.optim, args.optim_args = optim, optim_args
    optimizer = make_optimizer(nn.Linear(2, 2), args)
    assert isinstance(optimizer, Fake)
    assert expected.items() <= optimizer.settings.items()
    with resting(optimizer):
        assert optimizer.modes == [False]
    assert optimizer.modes == [False, True]


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        ("adamw_torch", None),
        ("adamw_torch_fused", None),
        ("adafactor", None),
        ("sgd", None),
        ("sgd", "momentum=0.9, dampening=0.1,nesterov=true"),
        ("adagrad", "lr_decay=0.1"),
        ("rmsprop", "momentum=0.9,alpha=0.5,centered=true"),
    ],
)
def test_class_and_settings_are_those_of_transformers(optim: str, optim_args: str | None, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optim": optim, "optim_args": optim_args, "adam_beta1": 0.8, "learning_rate": 0.1}
    transformers = pytest.importorskip("transformers", reason="compared with transformers")
    reference = transformers.Trainer.get_optimizer_cls_and_kwargs(transformers.TrainingArguments(str(tmp_path), **settings))
    assert optimizer_class_and_kwargs(TrainingArguments(str(tmp_path), **settings), nn.Linear(2, 2)) == reference


@pytest.mark.parametrize(
    ("optim", "optim_args", "sentence"),
    [
        (
            "sgd",
            "momentum",
            "optim_args='momentum' of optim='sgd': found momentum, expected settings out of momentum",
        ),
        ("sgd", "beta=3", "found beta=3, expected settings out of momentum"),
        ("adamw_torch", "beta=3", "found beta=3, expected none; leave it out"),
        ("sgd", "momentum=high", "momentum is 'high'; could not convert string to float"),
        ("sgd", "nesterov=perhaps", "nesterov is 'perhaps'; invalid literal for bool"),
        ("grokadamw", None, "GrokAdamW of the package grokadamw, which cannot be imported here: ModuleNotFoundError"),
        ("schedule_free_sgd", None, "warmup_steps=0.1 with optim='schedule_free_sgd': expected a whole number"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    optim: str, optim_args: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch, libraries: None
) -> None:
    monkeypatch.setitem(sys.modules, "grokadamw", None)  # type: ignore[arg-type]  # python's way of saying: not there
    args = TrainingArguments(warmup_steps=0.1)
    args.optim, args.optim_args = optim, optim_args
    with pytest.raises(ArgumentsError) as error:
        make_optimizer(nn.Linear(2, 2), args)
    assert sentence in str(error.value)


def test_adafactor_equals_transformers_step_by_step() -> None:
    transformers = pytest.importorskip("transformers", reason="compared with transformers")
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    optimizer = make_optimizer(model, TrainingArguments(optim="adafactor", learning_rate=0.1, weight_decay=0.2))
    reference = transformers.Adafactor(
        [{"params": [twin.weight], "weight_decay": 0.2}, {"params": [twin.bias], "weight_decay": 0.0}],
        lr=0.1,
        scale_parameter=False,
        relative_step=False,
    )
    for _ in range(3):
        for each, stepper in ((model, optimizer), (twin, reference)):
            stepper.zero_grad()
            each(torch.ones(1, 3)).square().sum().backward()
            stepper.step()
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.bias, twin.bias)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_what_decays_is_what_decays_in_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="compared with transformers")
    config = transformers.AutoConfig.for_model(kind)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    names = transformers.Trainer.get_decay_parameter_names(None, model)
    assert sorted(split_by_decay(model)[0]) == sorted(names)


def test_a_class_of_the_callers_own_and_what_it_may_bring() -> None:
    model, args = Model(), TrainingArguments(weight_decay=0.1)
    optimizer = make_optimizer(model, args, (torch.optim.SGD, {"lr": 0.3, "momentum": 0.5}))
    assert type(optimizer) is torch.optim.SGD
    assert [(group["lr"], group["momentum"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.3, 0.5, 0.1),
        (0.3, 0.5, 0.0),
    ]
    given = {"params": [{"params": [model.scale]}], "lr": 0.3}
    assert group_names(model, make_optimizer(model, args, (torch.optim.SGD, given))) == [["scale"]]
    assert "params" in given
    own = make_optimizer(model, args, decayed_names=["scale"])
    assert group_names(model, own)[0] == ["scale"]

    class Factory:
        def __call__(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=lr)

    assert make_optimizer(model, args, (Factory, {"lr": 0.7})).param_groups[0]["lr"] == 0.7


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
