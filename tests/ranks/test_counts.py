"""Steps, epochs, learning rates and logged losses do not depend on ranks or accumulation; nor does what a sample draws."""

import math
import random
import warnings

import numpy as np
import pytest
import torch

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.testing.models import Regression, RegressionNet
from allstep.testing.ranks import RankPool

SAMPLES = 13


@pytest.fixture(scope="module")
def three_ranks():
    with RankPool(3) as pool:
        yield pool


class Schedule(TrainerCallback):
    """What the schedule did: its steps, and the rate that each optimizer step used."""

    def __init__(self):
        self.rates, self.scheduled, self.epochs = [], [], []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.scheduled.append(lr_scheduler.last_epoch)
        self.epochs.append(state.epoch)


class Far(Regression):
    """Losses of samples differ by orders of magnitude, so that a mean over some of them is not that of all."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {"x": sample["x"], "labels": sample["labels"] + 3.0**index / 50}


def train(rank, size, folder, arguments, samples=SAMPLES, own_schedule=False):
    schedule = Schedule()
    settings = {"learning_rate": 0.01, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "max_grad_norm": 0}
    args = TrainingArguments(str(folder), **{**settings, **arguments})
    model = RegressionNet()
    own = (None, None)
    if own_schedule:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        own = optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=own_schedule + 1)
    trainer = Trainer(model, args, train_dataset=Far(samples), callbacks=[schedule], optimizers=own)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The training dataset has")
        output = trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "rates": schedule.rates,
        "scheduled": schedule.scheduled,
        "epochs": schedule.epochs,
        "logged": [(entry["step"], entry["epoch"], entry["learning_rate"]) for entry in logs],
        "losses": [entry["loss"] for entry in logs],
        "mean": output.training_loss,
        "samples": output.report.samples,
    }


def everywhere(pools, folder, global_batch, arguments, **more):
    """The run on 1, 2 and 3 ranks, with an accumulation of 1 and 2, and the same global batch: all ranks' results."""
    found = []
    for size in (1, 2, 3):
        for accumulation in (1, 2):
            sizes = {
                "per_device_train_batch_size": global_batch // (size * accumulation),
                "gradient_accumulation_steps": accumulation,
            }
            given = (folder / f"{size}-{accumulation}", {**sizes, **arguments}, *more.values())
            found += [train(0, 1, *given)] if size == 1 else pools[size].run(train, *given)
    return found


@pytest.fixture
def pools(ranks, three_ranks):
    return {2: ranks, 3: three_ranks}


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup", "inverse_sqrt"])
def test_the_learning_rate_of_a_step_depends_on_its_number_alone(pools, tmp_path, kind):
    """Twelve samples a step of 13: a full step and a ragged one in each of 4 epochs."""
    arguments = {"num_train_epochs": 4, "lr_scheduler_type": kind, "warmup_steps": 3}
    first, *others = everywhere(pools, tmp_path, 12, arguments)
    assert first["steps"] == 8
    assert first["scheduled"] == list(range(1, 9))  # once a step
    assert first["rates"][0] == 0.0
    assert len(set(first["rates"])) > 3
    assert [rate for *_, rate in first["logged"]] == first["rates"]
    for other in others:
        for key in ("steps", "epoch", "rates", "scheduled", "epochs", "logged"):
            assert other[key] == first[key]


def test_a_schedule_of_exact_length_never_oversteps(pools, tmp_path):
    """OneCycleLR raises in the step after its last."""
    first, *others = everywhere(pools, tmp_path, 12, {"max_steps": 7}, samples=SAMPLES, own_schedule=7)
    assert first["scheduled"] == list(range(1, 8))
    assert all(other["rates"] == first["rates"] for other in others)


@pytest.mark.parametrize(
    ("arguments", "samples", "steps", "epoch"),
    [
        ({"num_train_epochs": 3}, 13, 6, 3.0),  # ragged tails
        ({"num_train_epochs": 3}, 12, 3, 3.0),
        ({"num_train_epochs": 3}, 5, 3, 3.0),  # fewer than a global batch
        ({"num_train_epochs": 1}, 1, 1, 1.0),
        ({"num_train_epochs": 0.5}, 40, 2, 0.5),
        ({"num_train_epochs": 1.5}, 40, 6, 1.5),
        ({"num_train_epochs": 0.1}, 40, 1, 0.25),  # a part of a step is a step
        ({"max_steps": 5}, 25, 5, 1 + 2 / 3),  # over the end of an epoch
        ({"max_steps": 3, "num_train_epochs": 9}, 13, 3, 1.5),
        ({"max_steps": 4}, 13, 4, 2.0),
    ],
    ids=str,
)
def test_steps_and_epochs_are_those_of_the_global_batch(pools, tmp_path, arguments, samples, steps, epoch):
    for found in everywhere(pools, tmp_path, 12, arguments, samples=samples):
        assert found["steps"] == steps
        assert found["epoch"] == pytest.approx(epoch, abs=1e-12)
        assert len(found["rates"]) == len(found["logged"]) == steps
        per_epoch = math.ceil(samples / 12)
        whole, rest = divmod(steps, per_epoch)
        assert found["samples"] == whole * samples + min(samples, 12 * rest)


@pytest.mark.parametrize("every", [1, 2, 3, 8])
def test_a_logged_loss_is_the_mean_over_all_samples_since_the_last_log(pools, tmp_path, every):
    """With a learning rate of 0, the losses of a step are those of its samples, and their mean is that of one process."""
    arguments = {"num_train_epochs": 4, "learning_rate": 0.0, "logging_steps": every}
    each_step = train(0, 1, tmp_path / "alone", {**arguments, "per_device_train_batch_size": 12, "logging_steps": 1})
    sizes = [12, 1] * 4
    for found in everywhere(pools, tmp_path, 12, arguments):
        steps = [step for step, *_ in found["logged"]]
        assert steps == list(range(every, 9, every))
        for step, loss in zip(steps, found["losses"], strict=True):
            since = range(step - every, step)
            mean = sum(each_step["losses"][at] * sizes[at] for at in since) / sum(sizes[at] for at in since)
            assert loss == pytest.approx(mean, rel=1e-6)
        whole = sum(loss * size for loss, size in zip(each_step["losses"], sizes, strict=True)) / sum(sizes)
        assert found["mean"] == pytest.approx(whole, rel=1e-6)
    assert max(each_step["losses"]) > 10 * min(each_step["losses"])


# What is drawn, and what each rank sees.


class Drawing(Regression):
    """Its rows are draws of numpy, random and torch."""

    def __getitem__(self, index):
        draws = [float(np.random.rand()), random.random(), float(torch.rand(()))]
        return {"x": torch.tensor([float(index), *draws]), "labels": torch.tensor(0.0)}


class Remembering(RegressionNet):
    def __init__(self):
        super().__init__()
        self.rows = []

    def forward(self, x, labels=None):
        self.rows += x.tolist()
        return super().forward(x, labels)


def seen(rank, size, folder, workers, seed=1):
    """By epoch, the rows that this rank saw."""
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=6 // size,
        num_train_epochs=3,
        dataloader_num_workers=workers,
        learning_rate=0.0,
        save_strategy="no",
        disable_tqdm=True,
        seed=seed,
    )
    model = Remembering()
    Trainer(model, args, train_dataset=Drawing(12)).train()
    count = len(model.rows) // 3
    return [model.rows[at : at + count] for at in range(0, 3 * count, count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_rank_worker_and_epoch_draws_for_itself_and_a_seed_says_what(ranks, tmp_path, workers):
    """Orders differ between epochs, ranks share no sample, and draws are those of one process without workers."""
    alone = seen(0, 1, tmp_path, 0)
    on_two = ranks.run(seen, tmp_path, workers)
    draws, orders = set(), set()
    for epoch in range(3):
        rows = [row for rank in on_two for row in rank[epoch]]
        assert sorted(rows) == sorted(alone[epoch])
        assert sorted(row[0] for row in rows) == list(range(12))
        draws |= {draw for row in rows for draw in row[1:]}
        orders.add(tuple(row[0] for row in alone[epoch]))
    assert len(orders) == 3
    assert len(draws) == 3 * 12 * 3
    assert ranks.run(seen, tmp_path, workers) == on_two
    assert seen(0, 1, tmp_path, 0, 2) != alone
