"""Schedules that look at a metric move after each evaluation, on all ranks alike, and go on where they stood."""

import pytest
import torch

from allstep import Trainer, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing import faults
from allstep.testing.models import Regression, RegressionNet

SETTINGS = {
    "reduce_lr_on_plateau": {"patience": 0, "factor": 0.5},
    "greedy": {"patience": 0, "factor": 0.5, "min_lr": 1e-6},
}


def make(folder, size, name, callbacks=(), optimizers=(None, None), net=None, **more):
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // size,
        max_steps=12,
        learning_rate=0.01,
        lr_scheduler_type=name,
        lr_scheduler_kwargs=SETTINGS.get(name),
        eval_strategy="steps",
        eval_steps=2,
        save_steps=6,
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        **{"metric_for_best_model": "wave", "greater_is_better": False, **more},
    )
    return Trainer(
        RegressionNet() if net is None else net,
        args,
        train_dataset=Regression(64),
        eval_dataset=Regression(8, 1000),
        compute_metrics=wave,
        callbacks=list(callbacks),
        optimizers=optimizers,
    )


def wave(prediction):
    """Better three times, then worse; another number on another rank, as a careless metric gives."""
    wave.calls += 1
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return {"wave": [5.0, 4.0, 3.0, 3.5, 3.6, 3.7][wave.calls % 6] + 10.0 * (-1) ** wave.calls * rank}


def told(trainer):
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    return digest(trainer.model.named_parameters()), rates


def trained(rank, size, folder, name, stop_at=None, resume=None, more=None):
    wave.calls = -1 if resume is None else 2
    callbacks = [] if stop_at is None else [faults.fail(StopIteration(), rank=rank, step=stop_at)]
    trainer = make(folder, size, name, callbacks, **(more or {}))
    if stop_at is not None:
        with pytest.raises(StopIteration):
            trainer.train()
        return None
    trainer.train(resume_from_checkpoint=resume)
    return told(trainer)


RATES = {
    "reduce_lr_on_plateau": [0.01] * 8 + [0.005] * 2 + [0.0025] * 2,
    "greedy": [0.01] * 2 + [0.02] * 2 + [0.04] * 2 + [0.08] * 2 + [0.04] * 2 + [0.02] * 2,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_rates_follow_rank_0s_metric_on_all_ranks_also_after_a_resume(ranks, tmp_path, name):
    first, second = ranks.run(trained, tmp_path / "whole", name)
    assert first == second
    assert first[1] == pytest.approx(RATES[name])
    ranks.run(trained, tmp_path / "parts", name, 7)
    assert ranks.run(trained, tmp_path / "parts", name, None, "auto") == [first, first]
    larger = ranks.run(trained, tmp_path / "larger", name, None, None, {"greater_is_better": True})[0][1]
    assert larger != pytest.approx(RATES[name])  # what is better is worse


def with_own(rank, size, folder):
    wave.calls = -1
    net = RegressionNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    trainer = make(folder, size, "linear", optimizers=(optimizer, scheduler), net=net)
    trainer.train()
    return told(trainer)[1]


def test_a_schedule_of_the_users_own_is_treated_alike(ranks, tmp_path):
    assert ranks.run(with_own, tmp_path) == [pytest.approx(RATES["reduce_lr_on_plateau"])] * 2
