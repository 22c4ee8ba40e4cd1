"""Precision follows from the arguments, else from the launcher; evaluation in a low dtype leaves no trace."""

import os

import pytest
import torch
from torch import nn

from allstep import TrainingArguments
from allstep.errors import ArgumentsError
from allstep.trainer.models.precision import (
    autocast,
    evaluation_dtype,
    in_evaluation_dtype,
    precision_line,
    precision_of,
    set_numerics,
)

VARIABLE = "ACCELERATE_MIXED_PRECISION"


def arguments(folder, **settings):
    return TrainingArguments(str(folder), **settings)


@pytest.mark.parametrize(("field", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_both_are_autocast(tmp_path, field, dtype):
    with autocast(arguments(tmp_path, **{field: True}), torch.device("cpu")):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is dtype
    with autocast(arguments(tmp_path), torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("told", "settings", "precision", "is_said"),
    [
        (None, {}, "no", False),
        ("no", {}, "no", False),
        ("bf16", {}, "bf16", True),
        ("fp16", {}, "fp16", True),
        ("fp16", {"bf16": True}, "bf16", False),
        ("no", {"fp16": True}, "fp16", False),
    ],
)
def test_the_launcher_is_heard_where_the_arguments_say_nothing(tmp_path, monkeypatch, told, settings, precision, is_said):
    if told is not None:
        monkeypatch.setenv(VARIABLE, told)
    args = arguments(tmp_path, **settings)
    assert precision_of(args) == precision
    line = precision_line(args)
    assert (line is not None) == is_said
    assert line is None or f"precision {precision}, as the launcher was told" in line


def test_a_precision_that_there_is_not_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "fp8")
    with pytest.raises(
        ArgumentsError, match=r"--mixed_precision fp8 \(ACCELERATE_MIXED_PRECISION\): expected no, bf16 or fp16"
    ):
        precision_of(arguments(tmp_path))
    assert precision_of(arguments(tmp_path, bf16=True)) == "bf16"


class Net(nn.Module):
    """With a tied weight, floating and whole buffers; notes the dtypes that its forward sees."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.rand(4))
        self.register_buffer("count", torch.arange(3))
        self.seen = []

    def forward(self, x, labels):
        self.seen.append([each.dtype for each in (x, labels, self.first.weight, self.second.weight, self.shift, self.count)])
        if not x.shape[0]:
            raise ValueError("no rows")
        return self.second(self.first(x)) + self.shift


@pytest.mark.parametrize(("field", "dtype"), [("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)])
def test_a_model_is_evaluated_in_a_low_dtype_and_is_the_same_afterwards(tmp_path, field, dtype):
    net = Net()
    before = [(each, each.data_ptr(), each.detach().clone()) for each in (*net.parameters(), *net.buffers())]
    assert evaluation_dtype(arguments(tmp_path)) is None
    with in_evaluation_dtype(net, evaluation_dtype(arguments(tmp_path, **{field: True}))):
        out = net(torch.ones(2, 4), labels=torch.arange(2))
    assert out.dtype is dtype
    assert net.seen == [[dtype, torch.int64, dtype, dtype, dtype, torch.int64]]
    with pytest.raises(ValueError, match="no rows"), in_evaluation_dtype(net, dtype):
        net(torch.ones(0, 4), torch.arange(2))
    for tensor, address, value in before:
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, value)
    assert net(torch.ones(2, 4), torch.ones(2)).dtype is torch.float32
    assert net.seen[-1][:2] == [torch.float32, torch.float32]


@pytest.fixture
def flags():
    """torch's switches, as they were."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    matmul, cudnn, benchmark = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    )
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_told_to_torch_and_left_alone_where_nobody_says(tmp_path, flags, tf32):
    torch.backends.cuda.matmul.allow_tf32 = not tf32
    set_numerics(arguments(tmp_path), {})
    assert torch.backends.cuda.matmul.allow_tf32 is not tf32
    set_numerics(arguments(tmp_path, tf32=tf32), {})
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32


def test_determinism_is_told_to_torch_and_to_kernels_that_read_variables(tmp_path, flags):
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    set_numerics(arguments(tmp_path), variables)
    assert not torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.benchmark = True
    set_numerics(arguments(tmp_path, full_determinism=True), variables)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert variables == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
    assert "FLASH_ATTENTION_DETERMINISTIC" not in os.environ
