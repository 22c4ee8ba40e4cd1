"""Gradients that are not finite on one rank: told with rank, parameter and samples before the optimizer moves, or left out."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from allstep import Trainer, TrainingArguments
from allstep.comm.agreement import digest
from allstep.errors import NonFiniteGradientsError
from allstep.testing import faults
from allstep.testing.models import Regression, RegressionNet
from allstep.trainer.nonfinite import MOST_IN_A_ROW, MOST_SAVED

BACKENDS = ("gloo", "shm")

BAD = 23
"""The sample that is NaN."""


class Rows(Regression):
    """Of which one may be NaN, or absent: then the rows behind it move up."""

    def __init__(self, samples, bad=None):
        super().__init__(samples)
        self.bad = bad

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {**row, "x": row["x"] * float("nan")} if index == self.bad else row


class WithStatistics(RegressionNet):
    """Whose buffers a NaN spoils."""

    def __init__(self):
        super().__init__(0.2)
        self.net.insert(1, torch.nn.BatchNorm1d(16))


def make(folder, rows, policy, *, callbacks=(), clip=1.0, net=RegressionNet, schedule="linear", steps=15, **more):
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type=schedule,
        max_grad_norm=clip,
        nonfinite_gradients=policy,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )
    return Trainer(net(), args, train_dataset=rows, callbacks=list(callbacks))


def raised(rank, size, folder, clip):
    trainer = make(folder, Rows(60, BAD), "raise", clip=clip)
    try:
        trainer.train()
    except NonFiniteGradientsError as error:
        state = trainer.state
        return str(error), error.collateral, state.global_step, digest(trainer.model.named_parameters())
    return None


def weights_before(rank, size, folder, step):
    trainer = make(folder, Rows(60), "ignore", steps=15)
    trainer.add_callback(faults.fail(StopIteration(), rank=rank, step=step + 1))
    with contextlib.suppress(StopIteration, RuntimeError):
        trainer.train()
    return digest(trainer.model.named_parameters())


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_bad_sample_is_named_by_all_ranks_and_the_optimizer_has_not_moved(ranks, tmp_path, clip):
    found = ranks.run(raised, tmp_path, clip)
    messages, collateral, steps, weights = zip(*found, strict=True)
    assert messages[0] == messages[1]
    assert sorted(collateral) == [False, True]
    bad_rank = collateral.index(False)
    assert steps[0] == steps[1]
    assert f"Gradients of step {steps[0] + 1} are not finite; the optimizer has not moved." in messages[0]
    assert f"rank {bad_rank}: 'net.0.weight' and 3 more, from micro-batch " in messages[0]
    assert f"input 'x' of sample(s) {BAD} is not finite itself" in messages[0]
    assert weights[0] == weights[1]
    (saved,) = (tmp_path / "nonfinite").iterdir()
    batch = torch.load(saved, weights_only=True)
    assert BAD in batch["sample_ids"]
    assert batch["rank"] == bad_rank
    assert torch.equal(
        batch["inputs"]["labels"], torch.stack([Regression(60)[index]["labels"] for index in batch["sample_ids"]])
    )
    if clip:
        assert weights[0] == ranks.run(weights_before, tmp_path / "well", steps[0])[0]


def skipped(rank, size, folder, net):
    trainer = make(folder, Rows(60, BAD), "skip", net=net, logging_first_step=True)
    trainer.train()
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
    return trainer.state.global_step, trainer.state.skipped_steps, finite, rates, losses


@pytest.mark.parametrize("net", [RegressionNet, WithStatistics])
def test_a_step_that_is_left_out_counts_but_moves_neither_weights_nor_schedule(ranks, tmp_path, net):
    for step, left_out, finite, rates, losses in ranks.run(skipped, tmp_path, net):
        assert (step, left_out) == (15, 2)  # 60 samples are 7.5 steps of 8: the bad one comes in two epochs
        assert finite
        assert len(rates) == len(losses) == 13
        assert rates == pytest.approx([1e-2 * (1 - done / 15) for done in range(13)])
        assert all(loss == loss for loss in losses)


def poisoned(rank, size, folder, policy):
    fault = faults.nan(rank=1, step=3, parameter="net.3.bias")
    trainer = make(folder, Rows(60), policy, callbacks=[fault], steps=6)
    try:
        trainer.train()
    except NonFiniteGradientsError as error:
        return fault.fired, str(error)
    return fault.fired, trainer.state.skipped_steps


def test_a_gradient_that_is_spoilt_after_the_loss_is_named_too(ranks, tmp_path):
    (none, words), (fired, same) = ranks.run(poisoned, tmp_path, "raise")
    assert (none, fired) == (0, 1)
    assert words == same
    assert "Gradients of step 3 are not finite" in words
    assert "rank 1: 'net.3.bias', from micro-batch " in words
    assert ranks.run(poisoned, tmp_path, "skip") == [(0, 1), (1, 1)]


def overflowing(rank, size, folder):
    trainer = make(folder, Rows(60), "raise", steps=2)
    trainer.model.net[3].bias.register_hook(lambda gradient: gradient * 1e30)
    try:
        trainer.train()
    except NonFiniteGradientsError as error:
        return str(error)
    return ""


def test_sums_that_are_too_large_are_told_as_such(ranks, tmp_path):
    words = ranks.run(overflowing, tmp_path)
    assert words[0] == words[1]
    assert "each rank's own gradients are finite: their sum or norm is too large" in words[0]


def test_one_rank_alone_reads_the_same(tmp_path):
    words, collateral, steps, _ = raised(0, 1, tmp_path, 1.0)
    assert not collateral
    assert "rank 0: 'net.0.weight'" in words
    assert str(BAD) in words
    lines = (Path(tmp_path) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][-1] == steps


class Hopeless(RegressionNet):
    """Whose weights are no good any more, from its seventh forward on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        self.count = getattr(self, "count", 0) + 1
        return {"loss": outputs["loss"] * (float("nan") if self.count > 6 else 1.0)}


def hopeless(rank, size, folder):
    trainer = make(folder, Rows(600), "skip", net=Hopeless, steps=100)
    try:
        trainer.train()
    except NonFiniteGradientsError as error:
        return str(error), trainer.state.global_step, trainer.state.skipped_steps
    return None


def test_steps_are_not_left_out_for_ever(ranks, tmp_path):
    (words, steps, left_out), other = ranks.run(hopeless, tmp_path)
    assert other == (words, steps, left_out)
    assert left_out == MOST_IN_A_ROW
    assert steps == 3 + MOST_IN_A_ROW
    assert f"{MOST_IN_A_ROW} steps before it were left out" in words
    assert len(list((tmp_path / "nonfinite").iterdir())) <= 2 * MOST_SAVED


class Stream(torch.utils.data.IterableDataset):
    """Row 23 of which is not finite."""

    def __iter__(self):
        rows = Rows(60, BAD)
        return (rows[index] for index in range(60))


def streamed(rank, size, folder, policy):
    trainer = make(folder, Stream(), policy, steps=10)
    try:
        trainer.train()
    except NonFiniteGradientsError as error:
        return str(error)
    return trainer.state.skipped_steps


def test_samples_of_a_stream_are_named_by_their_place(ranks, tmp_path):
    words = ranks.run(streamed, tmp_path, "raise")
    assert words[0] == words[1]
    assert f"input 'x' of sample(s) {BAD} is not finite itself" in words[0]
    assert ranks.run(streamed, tmp_path, "skip") == [1, 1]


def trained_twice(rank, size, folder):
    trainer = make(folder, Rows(60), "raise", steps=5)
    weights = []
    for _ in range(2):
        trainer.train()
        weights.append(digest(trainer.model.named_parameters()))
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    return weights[0] != weights[1], rates[-5:]


def test_to_train_again_begins_the_schedule_anew(ranks, tmp_path):
    for has_learnt, rates in ranks.run(trained_twice, tmp_path):
        assert has_learnt
        assert rates == pytest.approx([1e-2 * (1 - done / 5) for done in range(5)])
