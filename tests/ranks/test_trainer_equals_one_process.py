"""Two ranks train to the weights of one process on the same global batch, with each sample once an epoch."""

import pytest
import torch

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing.models import Noisy, Regression, RegressionNet, Seen

BACKENDS = ("gloo", "shm")


class Recorder(TrainerCallback):
    """Keeps the reduced gradients of every step, and how often buckets were reduced."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append([parameter.grad.clone() for parameter in model.parameters()])


def make(folder, dataset, dropout=0.0, callbacks=(), **arguments):
    settings = {"learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "max_grad_norm": 0.0}
    args = TrainingArguments(str(folder), **{**settings, **arguments})
    return Trainer(RegressionNet(dropout), args, train_dataset=dataset, callbacks=list(callbacks))


def train(rank, size, folder, arguments, samples, dropout=0.0, noisy=False):
    recorder = Recorder()
    dataset = Noisy(samples) if noisy else Seen(samples)
    trainer = make(folder, dataset, dropout, [recorder], **arguments)
    trainer.train()
    return {
        "digest": digest(trainer.model.named_parameters()),
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
        "gradients": recorder.gradients,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry],
        "indices": getattr(dataset, "indices", None),
        "epoch": trainer.state.epoch,
        "collectives": trainer.last_run.model.collectives_per_bucket,
        "steps": trainer.state.global_step,
    }


def test_twenty_adamw_steps_on_the_whole_batch_in_one_forward(ranks, tmp_path):
    """One process sees the global batch of 16 at once, two ranks see 8 each: sums in another order, so 1e-6."""
    on_two = ranks.run(train, tmp_path / "two", {"per_device_train_batch_size": 8, "max_steps": 20}, 64)
    alone = train(0, 1, tmp_path / "one", {"per_device_train_batch_size": 16, "max_steps": 20}, 64)
    assert on_two[0]["digest"] == on_two[1]["digest"]
    assert on_two[0]["steps"] == alone["steps"] == 20
    for ours, reference in zip(on_two[0]["weights"], alone["weights"], strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(on_two[0]["losses"], alone["losses"], rtol=1e-6, atol=1e-6)
    assert on_two[0]["rates"] == alone["rates"]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_micro_batches_give_the_same_bits(ranks, tmp_path, workers):
    """With a grid of two, no sum has more than two terms: equal bits, with dropout, augmentation and a ragged tail."""
    shared = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "dataloader_num_workers": workers, "max_grad_norm": 1.0}
    on_two = ranks.run(train, tmp_path / "two", shared, 27, 0.2, True)
    alone = train(0, 1, tmp_path / "one", {**shared, "gradient_accumulation_steps": 2}, 27, 0.2, True)
    assert on_two[0]["digest"] == on_two[1]["digest"] == alone["digest"]
    assert on_two[0]["losses"] == on_two[1]["losses"] == alone["losses"]


def test_accumulation_reduces_each_bucket_once_a_step(ranks, tmp_path):
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 5, "ddp_bucket_cap_mb": 1e-4}
    for result in ranks.run(train, tmp_path, arguments, 64):
        assert len(result["collectives"]) > 1
        assert set(result["collectives"]) == {5}


def test_every_sample_exactly_once_an_epoch_and_every_gradient_that_of_the_window(ranks, tmp_path):
    """10 samples, 2 ranks x batch 2 x accumulation 2: windows of 8 and 2 samples, rank 1 without any in the second."""
    arguments = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "learning_rate": 0.05,
    }
    first, second = ranks.run(train, tmp_path, arguments, 10)
    seen = first["indices"] + second["indices"]
    assert sorted(seen) == sorted(list(range(10)) * 3)
    assert first["epoch"] == 3.0
    assert first["steps"] == 6
    assert all(torch.equal(a, b) for a, b in zip(first["gradients"][1], second["gradients"][1], strict=True))

    model, dataset = RegressionNet(), Regression(10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    mine, theirs = iter(first["indices"]), iter(second["indices"])
    for step, (own, other) in enumerate([(4, 4), (2, 0)] * 3):
        window = [next(mine) for _ in range(own)] + [next(theirs) for _ in range(other)]
        rows = [dataset[index] for index in window]
        model(torch.stack([row["x"] for row in rows]), torch.stack([row["labels"] for row in rows]))["loss"].backward()
        for ours, parameter in zip(first["gradients"][step], model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=2e-5, atol=1e-6)
        for group in optimizer.param_groups:
            group["lr"] = first["rates"][step]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("samples", "batch", "accumulation"), [(1, 2, 1), (3, 2, 2), (9, 2, 2), (17, 4, 1)])
@pytest.mark.filterwarnings("ignore:The training dataset has")
def test_counts_do_not_depend_on_ranks(ranks, tmp_path, samples, batch, accumulation):
    arguments = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "num_train_epochs": 2}
    first, second = ranks.run(train_quietly, tmp_path / "two", arguments, samples)
    doubled = {**arguments, "gradient_accumulation_steps": 2 * accumulation}
    alone = train(0, 1, tmp_path / "one", doubled, samples)
    assert sorted(first["indices"] + second["indices"]) == sorted(alone["indices"]) == sorted(list(range(samples)) * 2)
    for key in ("steps", "epoch", "rates"):
        assert first[key] == second[key] == alone[key]
    torch.testing.assert_close(first["losses"], alone["losses"], rtol=1e-6, atol=1e-6)


def train_quietly(rank, size, *arguments):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(rank, size, *arguments)


def drop_last(rank, size, folder):
    dataset = Seen(11)
    trainer = make(folder, dataset, per_device_train_batch_size=2, dataloader_drop_last=True, num_train_epochs=2)
    trainer.train()
    return trainer.state.global_step, len(dataset.indices)


def test_drop_last_leaves_out_what_does_not_fill_a_global_batch(ranks, tmp_path):
    assert ranks.run(drop_last, tmp_path) == [(4, 8), (4, 8)]
