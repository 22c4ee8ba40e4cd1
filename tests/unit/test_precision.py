"""Precision follows from the arguments; a launcher that was told of another one is not passed over without a word."""

import warnings

import pytest
import torch

from allstep import TrainingArguments
from allstep.trainer.precision import autocast, warn_of_precision


def test_bf16_is_autocast(tmp_path):
    with autocast(TrainingArguments(str(tmp_path), bf16=True), torch.device("cpu")):
        assert torch.is_autocast_enabled("cpu")
    with autocast(TrainingArguments(str(tmp_path)), torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("asked", "bf16"), [("bf16", False), ("fp16", True), ("fp16", False)])
def test_what_only_the_launcher_was_told_is_warned_of(tmp_path, asked, bf16):
    with pytest.warns(UserWarning, match=f"--mixed_precision {asked}"):
        warn_of_precision(TrainingArguments(str(tmp_path), bf16=bf16), {"ACCELERATE_MIXED_PRECISION": asked})


@pytest.mark.parametrize(
    ("variables", "bf16"),
    [({}, False), ({"ACCELERATE_MIXED_PRECISION": "no"}, True), ({"ACCELERATE_MIXED_PRECISION": "bf16"}, True)],
)
def test_otherwise_there_is_no_warning(tmp_path, variables, bf16):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_precision(TrainingArguments(str(tmp_path), bf16=bf16), variables)
