"""What cannot be trained on: an error on every rank that says what, where and on which rank, and nothing half-written."""

import json
import re
import sys
import traceback

import pytest
import torch
from torch import nn

from allstep import Trainer, TrainingArguments
from allstep.testing.models import Regression, RegressionNet


class Torn(Regression):
    """Row 5 cannot be read."""

    def __getitem__(self, index):
        if index == 5:
            raise LookupError("row 5 is torn")
        return super().__getitem__(index)


class Normed(RegressionNet):
    """Has buffers; refuses to go on in forward or in backward, in the given step, on the given rank."""

    def __init__(self, rank, where=None, step=3):
        super().__init__()
        self.net.append(nn.BatchNorm1d(1))
        self.is_mine, self.where, self.calls, self.step = rank == 1, where, 0, step

    def forward(self, x, labels=None):
        self.calls += self.training
        now = self.training and self.is_mine and self.calls == self.step
        if now and self.where == "forward":
            raise LookupError("the model refuses this batch")
        outputs = super().forward(x, labels)
        if now and self.where == "backward":
            outputs["loss"].register_hook(refuse)
        return outputs


def refuse(gradient):
    raise LookupError("no way back")


def failing_collator(rank):
    calls = []

    def collator(samples):
        calls.append(None)
        if rank == 1 and len(calls) == 3:
            raise LookupError("rows do not fit together")
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}

    return collator


def failing_loss(rank):
    calls = []

    def loss(outputs, labels, num_items_in_batch=None):
        calls.append(None)
        if rank == 1 and len(calls) == 3:
            raise LookupError("the loss is lost")
        return nn.functional.mse_loss(outputs["logits"], labels)

    return loss


class Without(RegressionNet):
    def forward(self, x, labels=None):
        return {"logits": super().forward(x, labels)["logits"]}


def train(rank, size, folder, case):
    """How training ended: the error's class, its text with its notes, and the steps taken."""
    arguments, dataset, more, model = {}, Regression(24), {}, RegressionNet()
    match case:
        case "empty":
            dataset = Regression(0)
        case "empty list":
            dataset = []
        case "too small to drop":
            dataset, arguments = Regression(3), {"dataloader_drop_last": True}
        case "missing":
            dataset = None
        case "no length":
            dataset = iter(Regression(3))
        case "other length":
            dataset = Regression(24 + 8 * rank)
        case "other arguments":
            arguments = {"gradient_accumulation_steps": 1 + rank}
        case "torn":
            dataset = Torn(24)
        case "torn, with workers":
            dataset, arguments = Torn(24), {"dataloader_num_workers": 2}
        case "collator":
            more = {"data_collator": failing_collator(rank)}
        case "loss":
            model, more = Normed(rank), {"compute_loss_func": failing_loss(rank)}
        case "forward" | "backward":
            model = Normed(rank, case)
        case "second micro-batch":
            model, arguments = Normed(rank, "forward", step=6), {"gradient_accumulation_steps": 2, "num_train_epochs": 2}
        case "no loss":
            model = Without()
        case "metrics":
            more = {"compute_metrics": metrics_that_fail(range(2)), "eval_dataset": Regression(4)}
            arguments = {"eval_strategy": "steps", "eval_steps": 2}
        case "metrics on one rank":
            more = {"compute_metrics": metrics_that_fail([1], rank), "eval_dataset": Regression(4)}
            arguments = {"eval_strategy": "steps", "eval_steps": 2}
    defaults = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "logging_steps": 1, "save_steps": 2}
    args = TrainingArguments(str(folder), **{**defaults, "disable_tqdm": True, **arguments})
    trainer = Trainer(model, args, train_dataset=dataset, **more)
    try:
        trainer.train(resume_from_checkpoint=case == "nothing to resume")
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # the garbage collector would take seconds over loader workers in them
        notes = getattr(error, "__notes__", [])
        return type(error).__name__, "\n".join([str(error), *notes]), trainer.state.global_step
    return None


def metrics_that_fail(failing, rank=0):
    def compute_metrics(prediction):
        if rank in failing:
            raise LookupError("no such metric")
        return {}

    return compute_metrics


def check_folder(folder):
    """Checkpoints are whole, and there is nothing beside them and the metrics file."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.name == "metrics.jsonl":
            assert all(json.loads(line) for line in path.read_text().splitlines())
        else:
            assert path.name.startswith("checkpoint-"), path
            manifest = json.loads((path / "manifest.json").read_text())
            assert {file.name for file in path.iterdir()} == {*manifest["files"], "manifest.json"}


# The same mistake on every rank, found before anything is written.


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("empty", ["training dataset is empty", "at least one sample"]),
        ("empty list", ["training dataset is empty"]),
        ("too small to drop", ["3 samples", "global batch of 4", "2 micro-batches of 2", "dataloader_drop_last=False"]),
        ("missing", ["train_dataset", "without one"]),
        ("no length", ["has no __len__"]),
    ],
)
def test_a_dataset_that_cannot_be_trained_on_is_an_error_before_anything_is_written(ranks, tmp_path, case, words):
    for kind, text, _ in ranks.run(train, tmp_path / "out", case):
        assert kind == "DataError"
        assert all(word in text for word in words), text
    assert not (tmp_path / "out").exists()


def test_a_model_that_returns_no_loss_is_an_error_that_says_what_it_returned(ranks, tmp_path):
    for kind, text, steps in ranks.run(train, tmp_path / "out", "no loss"):
        assert kind == "ValueError"
        assert "Without returned no loss: found dict with keys logits" in text
        assert steps == 0
    check_folder(tmp_path / "out")


def test_nothing_to_resume_from_is_an_error(ranks, tmp_path):
    for kind, text, _ in ranks.run(train, tmp_path / "out", "nothing to resume"):
        assert kind == "CheckpointError"
        assert "no whole checkpoint" in text
    check_folder(tmp_path / "out")


@pytest.mark.parametrize("below", [True, False])
def test_an_output_folder_that_cannot_be_made_is_an_error_with_its_path(ranks, tmp_path, below):
    (tmp_path / "file").write_text("precious")
    folder = tmp_path / "file" / "out" if below else tmp_path / "file"
    for kind, text, _ in ranks.run(train, folder, "plain"):
        assert kind == "CheckpointError"
        assert str(folder) in text
        assert "Rank 0" in text
    assert (tmp_path / "file").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other length", ["24", "32", "rank 1"]),
        ("other arguments", ["gradient_accumulation_steps", "rank 1"]),
    ],
)
def test_ranks_that_were_told_different_things_hear_of_it_before_the_first_step(ranks, tmp_path, case, words):
    here, there = ranks.run(train, tmp_path / "out", case, timeout=30)
    assert here == there
    assert all(word in here[1] for word in words), here
    assert not (tmp_path / "out").exists()


# One rank cannot go on.


@pytest.mark.parametrize(
    ("case", "words", "place"),
    [
        ("collator", "rows do not fit together", "step 3, micro-batch 1, samples"),
        ("loss", "the loss is lost", "step 3, micro-batch 1, samples"),
        ("forward", "the model refuses this batch", "step 3, micro-batch 1, samples"),
        ("backward", "no way back", "step 3, micro-batch 1, samples"),
        ("second micro-batch", "the model refuses this batch", "step 3, micro-batch 3, samples"),
    ],
)
def test_what_one_rank_cannot_do_ends_both_and_names_rank_step_and_place(ranks, tmp_path, case, words, place):
    told, own = ranks.run(train, tmp_path, case, timeout=30)
    assert own[0] == "LookupError"
    assert told[0] == "RankFailedError"
    for kind, text, steps in (told, own):
        assert words in text, kind
        assert steps == 2
        if kind == "RankFailedError" or sys.version_info >= (3, 11):  # before, an error could carry no notes
            assert f"rank 1, {place}" in text, kind
    check_folder(tmp_path)
    assert (tmp_path / "checkpoint-2").exists()


@pytest.mark.parametrize("case", ["torn", "torn, with workers"])
def test_a_row_that_cannot_be_read_ends_both_ranks_in_the_same_step(ranks, tmp_path, case):
    ends = ranks.run(train, tmp_path, case, timeout=30)
    kinds = [kind for kind, _, _ in ends]
    assert sorted(kinds) == ["LookupError", "RankFailedError"]
    failed = kinds.index("LookupError")
    for kind, text, steps in ends:
        assert "row 5 is torn" in text
        if kind == "RankFailedError" or sys.version_info >= (3, 11):
            assert re.search(rf"rank {failed}, step {steps + 1}, micro-batch {failed}, samples .*\b5\b", text), text
    assert ends[0][2] == ends[1][2]
    check_folder(tmp_path)


def test_metrics_that_cannot_be_computed_end_every_rank_with_its_own_error(ranks, tmp_path):
    for kind, text, steps in ranks.run(train, tmp_path, "metrics", timeout=30):
        assert (kind, steps) == ("LookupError", 2)
        assert "no such metric" in text
    check_folder(tmp_path)


def test_metrics_that_one_rank_cannot_compute_end_both(ranks, tmp_path):
    told, own = ranks.run(train, tmp_path, "metrics on one rank", timeout=30)
    assert own[0] == "LookupError"
    assert told[0] == "RankFailedError"
    assert "Rank 1 failed while computing metrics: LookupError: no such metric" in told[1]
    check_folder(tmp_path)


def test_after_all_these_errors_the_same_ranks_train_to_the_end(ranks, tmp_path):
    assert ranks.run(train, tmp_path, "plain") == [None, None]
    check_folder(tmp_path)
