"""A model made ready: recomputation under its newer and its older name, and compilation in place."""

import warnings

import pytest
import torch
from torch import nn

from allstep import TrainingArguments
from allstep.errors import ArgumentsError
from allstep.trainer.models.prepare import prepare_model
from allstep.trainer.surface.base import made

CPU = torch.device("cpu")


class Older(nn.Linear):
    """Has the name of before transformers 5."""

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs):
        self.given = gradient_checkpointing_kwargs


class Newer(Older):
    def activation_checkpointing_enable(self, activation_checkpointing_kwargs, every_n_layers=1, offload=False):
        self.given = activation_checkpointing_kwargs, every_n_layers, offload


@pytest.mark.parametrize(
    ("kind", "settings", "given"),
    [
        (Older, None, {"use_reentrant": False}),
        (Older, {"use_reentrant": True, "preserve_rng_state": False}, {"use_reentrant": True, "preserve_rng_state": False}),
        (Newer, None, ({"use_reentrant": False}, 1, False)),
        (Newer, {"every_n_layers": 2, "offload": True}, ({"use_reentrant": False}, 2, True)),
    ],
)
def test_settings_of_recomputation_come_to_the_model(kind, settings, given):
    args = TrainingArguments(activation_checkpointing=True, activation_checkpointing_kwargs=settings)
    model = prepare_model(kind(2, 2), args, CPU)
    assert model.given == given


def test_a_model_of_transformers_recomputes_without_a_warning():
    transformers = pytest.importorskip("transformers", reason="a model of it is prepared")
    config = transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_model(model, TrainingArguments(gradient_checkpointing=True), CPU)
    assert model.is_activation_checkpointing


def test_a_plain_module_is_told_what_to_write():
    with pytest.raises(ArgumentsError, match=r"Linear has neither activation_checkpointing_enable\(\) nor gradient_"):
        prepare_model(nn.Linear(2, 2), TrainingArguments(activation_checkpointing=True), CPU)


def test_a_model_is_compiled_in_place_and_only_where_it_is_asked_for():
    model = nn.Linear(2, 2)
    assert prepare_model(model, TrainingArguments(), CPU) is model
    assert model._compiled_call_impl is None
    assert prepare_model(model, TrainingArguments(torch_compile_backend="eager"), CPU) is model
    assert model._compiled_call_impl is not None
    assert list(model.state_dict()) == ["weight", "bias"]


def test_a_model_is_made_by_functions_with_and_without_a_trial():
    model = nn.Linear(1, 1)
    assert made(lambda: model) is made(lambda trial: model) is made(lambda size=3, **more: model) is model
