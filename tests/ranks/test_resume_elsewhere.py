"""A run that moves to another number of ranks keeps its global batch, and ends with the bits of one that never stopped."""

import json
from collections import Counter

import pytest
import torch

from allstep import Trainer, TrainingArguments
from allstep.cli.verify.compare import first_difference
from allstep.comm.agreement import digest
from allstep.errors import ArgumentsError, CheckpointError
from allstep.report.ledger import read_ledger, samples_by_epoch
from allstep.testing.models import Noisy, RegressionNet, Seen
from allstep.testing.ranks import one_thread
from allstep.trainer.state import TrainerState
from allstep.trainer.throughput import MEASURED
from allstep.trainer.verification import StopAfter

BACKENDS = ("gloo", "shm")
SAMPLES = 44  # 5 steps and a half of 8


class Read(Seen, Noisy):
    """Augmented; keeps the indices that were read."""


def train(rank, size, folder, stop=None, resume=None, arguments=()):
    settings = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "deterministic_reduction": True,
        "logging_steps": 1,
        "save_steps": 1,
        "disable_tqdm": True,
        "ledger": True,
        "ledger_digest_steps": 2,
    }
    args = TrainingArguments(str(folder), **{**settings, **dict(arguments)})
    data = Read(SAMPLES)
    callbacks = [] if stop is None else [StopAfter(stop)]
    with one_thread():
        trainer = Trainer(RegressionNet(0.2), args, train_dataset=data, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
    optimizer = [(f"{i}.{key}", value) for i, s in trainer.optimizer.state_dict()["state"].items() for key, value in s.items()]
    return {
        "weights": digest(trainer.model.named_parameters()),
        "optimizer": digest((name, torch.as_tensor(value)) for name, value in optimizer),
        "logs": [{k: v for k, v in each.items() if k not in MEASURED} for each in trainer.state.log_history if "loss" in each],
        "indices": data.indices,
        "epoch": trainer.state.epoch,
        "batch": trainer.last_run.grid.global_batch_size,
    }


def test_two_then_one_then_four_ranks_end_as_one_that_never_stopped(ranks, four_ranks, tmp_path, capfd):
    whole = train(0, 1, tmp_path / "whole", arguments={"global_batch_size": 8})
    moved = tmp_path / "moved"
    first = ranks.run(train, moved, 2, None, {"gradient_accumulation_steps": 2})
    capfd.readouterr()
    second = train(0, 1, moved, 7, True)
    said = capfd.readouterr().out
    assert "checkpoint-2 at step 2, epoch 0.33: global batch of 8 = 1 rank(s) x 4 micro-batch(es) x 2 samples; 2 ra" in said
    assert "(gradient_accumulation_steps=1 would make 2: for that, write global_batch_size=2)" in said
    third = four_ranks.run(train, moved, None, True)
    for run in third:
        assert {key: run[key] for key in ("weights", "optimizer", "logs", "epoch", "batch")} == {
            key: whole[key] for key in ("weights", "optimizer", "logs", "epoch", "batch")
        }
    read = Counter(index for run in (*first, second, *third) for index in run["indices"])
    assert read == Counter(dict.fromkeys(range(SAMPLES), 2))
    ledger, reference = read_ledger(moved / "ledger"), read_ledger(tmp_path / "whole" / "ledger")
    assert samples_by_epoch(ledger.values()) == {epoch: Counter(range(SAMPLES)) for epoch in (0, 1)}
    assert [step.world_size for step in ledger.values()] == [2, 2, 1, 1, 1, 1, 1, 4, 4, 4, 4, 4]
    assert first_difference(reference, ledger) is None
    assert not any(step.ranks_differ for step in ledger.values())
    assert sum(bool(step.parameters) for step in ledger.values()) == 6


def test_a_global_batch_that_does_not_divide_is_refused_with_numbers_on_every_rank(four_ranks, tmp_path):
    train(0, 1, tmp_path, 2, arguments={"global_batch_size": 4})
    for outcome in four_ranks.outcomes(train, tmp_path, None, True):
        assert outcome.error == "ArgumentsError"
        assert "The global batch of the run that is resumed is 4 samples, which 4 rank(s) with micro-batches" in outcome.message
        assert "per_device_train_batch_size=1" in outcome.message


def test_accumulation_that_contradicts_the_global_batch_is_refused(tmp_path):
    with pytest.raises(ArgumentsError, match=r"needs gradient_accumulation_steps=4 on 1 rank.* given as 3"):
        train(0, 1, tmp_path, arguments={"global_batch_size": 8, "gradient_accumulation_steps": 3})


def test_another_global_batch_goes_on_at_the_same_sample_or_is_refused(tmp_path):
    train(0, 1, tmp_path, 4, arguments={"global_batch_size": 4})
    with pytest.warns(UserWarning, match="was trained with a global batch of 4 samples; this run goes on with 8"):
        on = train(0, 1, tmp_path, 5, f"{tmp_path}/checkpoint-4", {"global_batch_size": 8})
    whole = train(0, 1, tmp_path / "whole", 5, arguments={"global_batch_size": 4})
    assert sorted(on["indices"][:4]) == sorted(whole["indices"][16:20])
    with pytest.raises(CheckpointError, match=r"stands at sample 16 .* no step of 12 samples begins there"):
        train(0, 1, tmp_path, 6, f"{tmp_path}/checkpoint-4", {"global_batch_size": 12})


def test_a_checkpoint_holds_the_global_batch(ranks, tmp_path):
    ranks.run(train, tmp_path, 1, None, {"gradient_accumulation_steps": 2})
    assert json.loads((tmp_path / "checkpoint-1" / "manifest.json").read_text())["global_batch_size"] == 8
    assert TrainerState.load_from_json(tmp_path / "checkpoint-1" / "trainer_state.json").global_batch_size == 8
