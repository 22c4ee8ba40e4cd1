import json
import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.report.record import RunReport, StepRecord, json_line

NUMBERS = st.floats()
STEPS = st.builds(
    StepRecord,
    step=st.integers(1),
    epoch=NUMBERS,
    loss=NUMBERS,
    weight=NUMBERS,
    learning_rate=NUMBERS,
    grad_norm=st.one_of(st.none(), NUMBERS),
    samples=st.integers(0),
    tokens=st.one_of(st.none(), st.integers(0)),
    seconds=NUMBERS,
)
RUNS = st.builds(
    RunReport,
    steps=st.integers(0),
    first_step=st.integers(0),
    epoch=NUMBERS,
    samples=st.integers(0),
    seconds=NUMBERS,
    train_loss=NUMBERS,
    world_size=st.integers(1),
    digests=st.lists(st.text()).map(tuple),
    output_dir=st.one_of(st.text(), st.just("nan")),
)


def same(one: object, other: object) -> bool:
    """Equal field by field, where nan equals nan."""

    def equal(a: object, b: object) -> bool:
        return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))

    return type(one) is type(other) and all(
        equal(getattr(one, field.name), getattr(other, field.name))
        for field in fields(one)  # type: ignore[arg-type]
    )


def report(**changed: object) -> RunReport:
    values = {
        "steps": 300,
        "epoch": 2.5,
        "samples": 4800,
        "seconds": 75.0,
        "train_loss": 2.3456,
        "world_size": 2,
        "digests": ("ab" * 32, "ab" * 32),
        "output_dir": "out",
    }
    return RunReport(**(values | changed))  # type: ignore[arg-type]


@given(STEPS)
def test_a_step_comes_back_from_json_equal(record: StepRecord) -> None:
    assert same(StepRecord.from_json(record.to_json()), record)


@given(RUNS)
def test_a_run_comes_back_from_json_equal(record: RunReport) -> None:
    assert same(RunReport.from_json(record.to_json()), record)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@given(st.dictionaries(st.text(), st.one_of(NUMBERS, st.integers(), st.text(), st.none(), st.lists(NUMBERS))))
def test_a_line_is_one_line_of_json_that_strict_readers_take(values: dict[str, object]) -> None:
    line = json_line(values)
    assert len(line.splitlines()) == 1
    assert json.loads(line, parse_constant=refuse).keys() == values.keys()


def test_numbers_that_are_not_finite_are_strings_that_float_reads_back() -> None:
    line = json_line({"a": float("nan"), "b": float("inf"), "c": [float("-inf")]})
    assert json.loads(line) == {"a": "nan", "b": "inf", "c": ["-inf"]}


def test_numbers_of_numpy_and_torch_and_paths_are_plain() -> None:
    values = {
        "a": np.float64(0.5),
        "b": np.arange(2),
        "c": torch.tensor(1.5),
        "d": Path("x") / "y",
        "e": (np.float32("nan"),),
        "f": True,
    }
    assert json.loads(json_line(values)) == {"a": 0.5, "b": [0, 1], "c": 1.5, "d": "x/y", "e": ["nan"], "f": True}


def test_what_no_json_can_hold_is_an_error() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        json_line({"a": object()})


def test_a_field_of_a_newer_version_is_passed_over() -> None:
    text = json.dumps(json.loads(report().to_json()) | {"watts": 700})
    assert RunReport.from_json(text) == report()


def test_records_cannot_be_changed_and_take_keywords_only() -> None:
    with pytest.raises(FrozenInstanceError):
        report().steps = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        StepRecord(1, 0.5)  # type: ignore[misc, call-arg]


def test_a_step_reads_as_one_line() -> None:
    record = StepRecord(
        step=7, epoch=0.5, loss=3.21456, weight=16.0, learning_rate=5e-5, grad_norm=1.25, samples=16, seconds=0.02
    )
    assert str(record) == "step 7  loss 3.215  lr 5e-05  grad norm 1.250  800 samples/s"


def test_a_run_reads_as_a_few_lines_with_the_digest_of_each_rank() -> None:
    assert str(report()).splitlines() == [
        "300 steps (2.50 epochs) on 2 ranks in 0:01:15, 64.0 samples/s, mean loss 2.346",
        "weights of rank 0: sha256 abababababababab",
        "weights of rank 1: sha256 abababababababab",
        "all ranks hold the same weights",
        "output in out",
    ]
    assert "resumed at 100) on 1 rank in" in str(report(first_step=100, world_size=1, digests=("ab",)))


def test_a_run_whose_ranks_differ_says_so() -> None:
    differs = report(digests=("ab" * 32, "cd" * 32))
    assert not differs.replicas_are_identical
    assert "THE RANKS ENDED WITH DIFFERENT WEIGHTS" in str(differs)
    assert report().replicas_are_identical


def test_a_run_without_a_step_has_no_speed() -> None:
    assert report(steps=0, samples=0, seconds=0.0).samples_per_second == 0.0
    assert report().samples_per_second == 64.0
