"""What a model returned, and what its mean loss is worth."""

from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from allstep.trainer.models.losses import accepted_columns, call_model, label_names_of, loss_of, weight_of

ONE = torch.tensor(1.5)
Output = namedtuple("Output", ["loss", "logits"])


def model_with(forward):
    model = nn.Module()
    model.forward = forward
    return model


def test_mappings_become_keywords_and_sequences_positions():
    def model(*inputs, **named):
        return inputs, named

    assert call_model(model, {"a": 1}) == ((), {"a": 1})
    assert call_model(model, UserDict(a=1)) == ((), {"a": 1})
    assert call_model(model, (1, 2)) == call_model(model, [1, 2]) == ((1, 2), {})
    assert call_model(model, 5) == ((5,), {})


@pytest.mark.parametrize(
    "outputs",
    [
        ONE,
        ONE.reshape(1),
        ONE.reshape(1, 1),
        {"logits": torch.zeros(3), "loss": ONE},
        UserDict(loss=ONE),
        SimpleNamespace(loss=ONE, logits=None),
        (ONE, torch.zeros(3)),
        [ONE],
        Output(ONE, torch.zeros(3)),
    ],
    ids=repr,
)
def test_the_loss_is_found_as_one_number_wherever_models_put_it(outputs):
    loss = loss_of(outputs, nn.Identity())
    assert loss.shape == ()
    assert loss == 1.5


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        (torch.zeros(3), r"a tensor of shape \(3,\)"),
        ({"logits": torch.zeros(3)}, "dict with keys logits"),
        ({"loss": None}, "dict with keys loss"),
        ((), "tuple"),
        (None, "NoneType"),
        ((torch.zeros(2), ONE), r"a tensor of shape \(2,\)"),
        (SimpleNamespace(loss=3.0), "SimpleNamespace"),
    ],
    ids=str,
)
def test_no_loss_is_an_error_that_says_what_was_found(outputs, found):
    with pytest.raises(ValueError, match=f"Identity returned no loss: found {found}"):
        loss_of(outputs, nn.Identity())


def test_label_tokens_that_count_are_the_weight():
    labels = torch.tensor([[1, 2, -100], [-100, -100, 5]])
    assert weight_of({"x": torch.zeros(2, 3), "labels": labels}, ["labels"]) == 3
    assert weight_of({"labels": torch.full((2, 3), -100)}, ["labels"]) == 0


def test_pixels_have_a_label_of_their_own_that_is_ignored():
    pixels = torch.tensor([[[1, 255], [-100, 0]]])
    assert weight_of({"labels": pixels}, ["labels"], ignored_pixel=255) == 3
    assert weight_of({"labels": pixels[0]}, ["labels"], ignored_pixel=255) == 3, "tokens"
    assert weight_of({"labels": pixels}, ["labels"]) == 3


def test_class_labels_that_are_ignored_do_not_count():
    """A mean over the others is what cross_entropy gives; where all are ignored it is 0/0."""
    assert weight_of({"x": torch.zeros(4, 2), "labels": torch.tensor([1, -100, 0, -100])}, ["labels"]) == 2
    assert weight_of({"x": torch.zeros(2, 2), "labels": torch.tensor([-100, -100])}, ["labels"]) == 0


@pytest.mark.parametrize("shape", [(0,), (7,), (16, 16), (257,), (40, 50)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_few_labels_and_many_are_counted_alike(shape, dtype):
    labels = torch.randint(-101, -98, shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    assert weight_of({"labels": labels}, ["labels"]) == int((labels != -100).sum())
    assert weight_of({"labels": labels.t()}, ["labels"]) == int((labels != -100).sum())


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        ({"x": torch.zeros(4, 2), "labels": torch.zeros(4)}, ["labels"]),
        ({"x": torch.zeros(4, 2), "labels": torch.zeros(4, 3)}, ["labels"]),
        ({"x": torch.zeros(4, 2), "labels": torch.tensor([0, 1, 2, 0])}, ["labels"]),
        ({"x": torch.zeros(4, 2), "labels": torch.full((4, 2), -100)}, ["targets"]),
        ((torch.zeros(4, 2), torch.zeros(4)), ["labels"]),
        (torch.zeros(4, 2), ["labels"]),
    ],
)
def test_samples_are_the_weight_elsewhere(inputs, names):
    assert weight_of(inputs, names) == 4


def test_the_first_label_with_tokens_counts():
    inputs = {"is_next": torch.tensor([1.0, 0.0]), "labels": torch.tensor([[1, -100], [2, 3]])}
    assert weight_of(inputs, ["is_next", "labels"]) == 3


@pytest.mark.parametrize("inputs", [{}, 3, {"name": "x"}])
def test_what_has_no_samples_weighs_one(inputs):
    assert weight_of(inputs, ["labels"]) == 1


def test_names_of_labels_come_from_forward_unless_given():
    assert label_names_of(model_with(lambda x, labels=None: None), None) == ["labels"]
    assert label_names_of(model_with(lambda x, label_a, label_b: None), None) == ["label_a", "label_b"]
    assert label_names_of(model_with(lambda x: None), None) == ["labels"]
    assert label_names_of(model_with(lambda x, labels=None: None), ["y"]) == ["y"]


def test_columns_that_forward_does_not_take_are_told_apart():
    assert accepted_columns(model_with(lambda x, mask=None: None), ["y"]) == {"x", "mask", "y", "label", "label_ids", "labels"}
    assert accepted_columns(model_with(lambda **more: None), ["labels"]) is None
    assert accepted_columns(model_with(lambda x, **more: None), ["labels"]) == {"x", "label", "label_ids", "labels"}
