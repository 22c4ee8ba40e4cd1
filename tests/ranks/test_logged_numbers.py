"""What a run says of itself: the counts of all ranks, whatever their number, and names in Hugging Face's order."""

import json
import math

import pytest
import torch

from allstep import Trainer, TrainingArguments
from allstep.trainer.throughput import MEASURED


class Words(torch.nn.Module):
    def __init__(self, spoilt=()):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10)
        self.spoilt, self.forwards = spoilt, 0

    def forward(self, input_ids, labels, attention_mask=None):
        self.forwards += self.training
        logits = self.out(self.embed(input_ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss * math.nan if self.training and self.forwards in self.spoilt else loss}


class Ragged:
    """Rows of 6 tokens, of which the last ones are padding."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        words = torch.arange(6).add(index).remainder(10)
        mask = (torch.arange(6) < 3 + index % 4).long()
        return {"input_ids": words, "labels": words, "attention_mask": mask}


def train(rank, size, folder, settings, spoilt=()):
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder),
        **{"global_batch_size": 8, "per_device_train_batch_size": 2, "num_train_epochs": 1, "logging_steps": 1} | settings,
    )
    trainer = Trainer(Words(spoilt), args, train_dataset=Ragged(), eval_dataset=Ragged())
    metrics = trainer.train().metrics
    state = trainer.state
    logs = [entry for entry in state.log_history if "loss" in entry]
    return {"metrics": metrics, "logs": logs, "tokens": state.num_input_tokens_seen, "flos": state.total_flos}


TOKENS, REAL = 22 * 6, sum(3 + index % 4 for index in range(22))


@pytest.mark.parametrize(("counts", "expected"), [("no", 0), (True, TOKENS), ("non_padding", REAL)])
def test_counts_are_those_of_all_ranks(ranks, tmp_path, counts, expected):
    settings = {"include_num_input_tokens_seen": counts, "save_strategy": "no"}
    alone = train(0, 1, tmp_path / "alone", settings)
    for said in ranks.run(train, tmp_path, settings):
        assert said["tokens"] == alone["tokens"] == expected
        assert said["flos"] == alone["flos"] == said["metrics"]["total_flos"] == 6 * 50 * TOKENS
        seen = [entry.get("num_input_tokens_seen") for entry in said["logs"]]
        assert seen == [None] * 3 if counts == "no" else (seen[-1] == expected and seen == sorted(seen))


def test_names_come_in_transformers_order_and_measured_ones_behind_them(ranks, tmp_path):
    first, second = ranks.run(train, tmp_path, {"save_strategy": "no"})
    for said in (first, second):
        assert list(said["logs"][0])[:4] == ["loss", "grad_norm", "learning_rate", "epoch"]
        wanted = MEASURED - {"model_flops_utilization", "device_memory_peak_gb"}
        assert set(said["logs"][0]) == {"loss", "grad_norm", "learning_rate", "epoch", "step"} | wanted
        assert list(said["metrics"]) == [
            "train_runtime",
            "train_samples_per_second",
            "train_steps_per_second",
            "total_flos",
            "train_loss",
            "epoch",
        ]
    for ours, theirs in zip(first["logs"], second["logs"], strict=True):
        for name in ("data_share", "communication_share", "host_memory_peak_gb"):
            assert ours[name] == theirs[name], "all ranks say the same"
            assert ours[name] >= 0
        assert ours["data_share"] + ours["communication_share"] <= 1


def test_counts_go_on_after_a_resume(ranks, tmp_path):
    settings = {"include_num_input_tokens_seen": "all", "save_steps": 2}
    whole = ranks.run(train, tmp_path, settings)[0]
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert saved["num_input_tokens_seen"] == 2 * 8 * 6

    resumed = ranks.run(resume, tmp_path, settings)[0]
    assert (resumed["tokens"], resumed["flos"]) == (whole["tokens"], whole["flos"])


def resume(rank, size, folder, settings):
    args = TrainingArguments(str(folder), global_batch_size=8, per_device_train_batch_size=2, num_train_epochs=1, **settings)
    trainer = Trainer(Words(), args, train_dataset=Ragged())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return {"tokens": trainer.state.num_input_tokens_seen, "flos": trainer.state.total_flos}


@pytest.mark.parametrize("filtered", [True, False])
def test_a_loss_that_is_not_finite_is_left_out_of_the_mean_where_that_is_asked_for(ranks, tmp_path, filtered):
    settings = {"logging_nan_inf_filter": filtered, "nonfinite_gradients": "ignore", "logging_steps": 3, "save_strategy": "no"}
    settings |= {"learning_rate": 0.0, "max_grad_norm": 0.0, "optim": "sgd", "weight_decay": 0.0}
    said = ranks.run(train_spoilt, tmp_path, settings)
    assert said[0] == said[1]
    assert said[0] == [filtered] * 2


def train_spoilt(rank, size, folder, settings):
    """Of three steps of two micro-batches on each rank the second one is spoilt, on rank 1."""
    said = train(rank, size, folder, settings, spoilt=(3,) if rank == 1 else ())
    return [math.isfinite(said["logs"][0]["loss"]), math.isfinite(said["metrics"]["train_loss"])]


class Counts(Trainer):
    def floating_point_ops(self, inputs):
        return float(len(inputs["input_ids"]))


def count(rank, size, folder):
    args = TrainingArguments(str(folder), per_device_train_batch_size=2, num_train_epochs=2, save_strategy="no")
    trainer = Counts(Words(), args, train_dataset=Ragged())
    return trainer.train().metrics["total_flos"]


def test_an_override_counts_operations_in_its_own_way(ranks, tmp_path):
    assert ranks.run(count, tmp_path) == [44.0] * 2


def measured(rank, size, folder):
    args = TrainingArguments(str(folder), max_steps=2, save_strategy="no", skip_memory_metrics=False, eval_strategy="epoch")
    trainer = Trainer(Words(), args, train_dataset=Ragged(), eval_dataset=Ragged())
    trained, evaluated, predicted = trainer.train().metrics, trainer.evaluate(), trainer.predict(Ragged()).metrics
    within = [sorted(entry) for entry in trainer.state.log_history if "eval_loss" in entry]
    return [[name for name in each if "_mem_" in name] for each in (trained, evaluated, predicted, within[0])]


def test_memory_of_stages_is_told_by_names_of_transformers(ranks, tmp_path):
    kinds = ("alloc", "peaked")
    stages = {stage: [f"{stage}_mem_cpu_{kind}_delta" for kind in kinds] for stage in ("init", "train", "eval", "test")}
    train_names = [*stages["init"], "before_init_mem_cpu", *stages["train"]]
    assert ranks.run(measured, tmp_path) == 2 * [[train_names, stages["eval"], stages["test"], []]]
