"""Samples to a micro-batch, a micro-batch to a device, and how many samples it has."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from allstep.data.collate import collate, select_columns, size_of, to_device
from allstep.errors import DataError

Point = namedtuple("Point", ["x", "y"])
META = torch.device("meta")


@dataclass
class Row:
    x: torch.Tensor
    label: int


def test_samples_become_rows():
    batch = collate([{"x": torch.tensor([1.0, 2.0]), "n": 3}, {"x": torch.tensor([4.0, 5.0]), "n": 6}])
    assert torch.equal(batch["x"], torch.tensor([[1.0, 2.0], [4.0, 5.0]]))
    assert torch.equal(batch["n"], torch.tensor([3, 6]))


@pytest.mark.parametrize("name", ["label", "label_ids", "labels"])
def test_labels_go_by_one_name(name):
    assert collate([{"x": 1, name: 0}, {"x": 2, name: 1}])["labels"].tolist() == [0, 1]


def test_labels_of_dataclasses_go_by_that_name_too():
    batch = collate([Row(torch.zeros(2), 3), Row(torch.ones(2), 4)])
    assert batch["labels"].tolist() == [3, 4]
    assert batch["x"].shape == (2, 2)


def test_tuples_named_tuples_and_tensors_keep_their_kind():
    assert [tuple(part.shape) for part in collate([(torch.zeros(3), 1), (torch.zeros(3), 2)])] == [(2, 3), (2,)]
    assert type(collate([Point(1, 2), Point(3, 4)])) is Point
    assert collate([torch.zeros(3)] * 4).shape == (4, 3)


def test_lists_of_numbers_become_rows():
    """As data sets of token ids and of features keep them."""
    batch = collate([{"input_ids": [1, 2, 3], "label": 0}, {"input_ids": [4, 5, 6], "label": 1}])
    assert torch.equal(batch["input_ids"], torch.tensor([[1, 2, 3], [4, 5, 6]]))


def test_python_floats_have_torchs_default_precision():
    """float64 would not go through a float32 model, and as a label would break its backward."""
    batch = collate([{"x": [0.5, 1.0], "label": 0.25}, {"x": [1.5, 2.0], "label": 0.75}])
    assert batch["x"].dtype is torch.float32
    assert batch["labels"].dtype is torch.float32


def test_lists_of_unequal_length_are_an_error_that_names_the_column():
    with pytest.raises(DataError, match=r"'input_ids'.*data_collator that pads"):
        collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])


def test_arrays_keep_their_dtype():
    batch = collate([{"a": np.ones(2, np.float64), "b": np.ones(2, np.int32)}] * 2)
    assert batch["a"].dtype is torch.float64
    assert batch["b"].dtype is torch.int32


def test_only_named_columns_are_left():
    sample = {"x": 1, "labels": 2, "text": "long"}
    assert select_columns(sample, frozenset({"x", "labels"})) == {"x": 1, "labels": 2}
    assert select_columns(sample, None) is sample
    assert select_columns((1, 2), frozenset({"x"})) == (1, 2)


def test_every_tensor_moves_and_all_else_stays():
    tensor = torch.ones(2)
    moved = to_device(
        {"a": tensor, "b": [tensor, (tensor, "text")], "c": Point(tensor, None), "d": OrderedDict(e=tensor), "f": 3}, META
    )
    assert moved["a"].device == moved["b"][0].device == moved["b"][1][0].device == META
    assert moved["b"][1][1] == "text"
    assert type(moved["c"]) is Point
    assert moved["c"].x.device == META
    assert moved["c"].y is None
    assert moved["d"]["e"].device == META
    assert moved["f"] == 3


def test_a_mapping_of_another_kind_keeps_its_kind():
    moved = to_device(UserDict(x=torch.ones(2)), META)
    assert type(moved) is UserDict
    assert moved["x"].device == META


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        ({"x": torch.zeros(4), "y": torch.zeros(3)}, 4),
        ({"scale": torch.tensor(1.0), "x": torch.zeros(4, 2)}, 4),
        (("text", [None, torch.zeros(6)]), 6),
        ({"nested": {"x": torch.zeros(2)}}, 2),
        (torch.tensor(1.0), None),
        ({}, None),
        ("text", None),
        (None, None),
        (torch.zeros(0, 3), 0),
    ],
)
def test_the_size_of_a_batch_is_the_first_dimension_of_its_first_tensor(batch, size):
    assert size_of(batch) == size
