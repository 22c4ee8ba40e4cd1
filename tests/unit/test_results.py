"""Metrics as a table and as files."""

import json

import numpy as np
import pytest
import torch

from allstep.report.results import metrics_format, metrics_table, save_metrics

METRICS = {
    "epoch": 2.5,
    "train_loss": 0.123456789,
    "train_runtime": 3725.678,
    "total_flos": 5 * 2**30,
    "train_mem_cpu_alloc_delta": 300 * 2**20 + 7,
    "train_samples": 10,
    "note": "x",
}


def test_the_table_is_by_name_with_units_and_values_to_the_right():
    assert metrics_table("train", METRICS).splitlines() == [
        "***** train metrics *****",
        "  epoch                     =        2.5",
        "  note                      =          x",
        "  total_flos                =        5GF",
        "  train_loss                =     0.1235",
        "  train_mem_cpu_alloc_delta =      300MB",
        "  train_runtime             = 1:02:05.67",
        "  train_samples             =         10",
    ]


def test_the_table_and_the_format_are_transformers(capsys):
    theirs = pytest.importorskip("transformers.trainer_pt_utils", reason="the package transformers is not installed")
    assert metrics_format(METRICS) == theirs.metrics_format(METRICS)
    theirs.log_metrics(type("Main", (), {"is_world_process_zero": lambda self: True})(), "train", METRICS)
    assert capsys.readouterr().out == metrics_table("train", METRICS) + "\n"


def test_files_hold_plain_numbers_and_all_results_those_of_every_split(tmp_path):
    folder = tmp_path / "run"
    save_metrics(folder, "train", {"train_loss": np.float32(0.5), "nested": torch.tensor(2)})
    save_metrics(folder, "eval", {"eval_loss": 0.25})
    save_metrics(folder, "test", {"test_loss": 1.0}, combined=False)
    read = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    assert read == {
        "train_results.json": {"train_loss": 0.5, "nested": 2},
        "eval_results.json": {"eval_loss": 0.25},
        "test_results.json": {"test_loss": 1.0},
        "all_results.json": {"train_loss": 0.5, "nested": 2, "eval_loss": 0.25},
    }


def test_no_metrics_are_a_heading():
    assert metrics_table("eval", {}) == "***** eval metrics *****"
