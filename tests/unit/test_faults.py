"""Faults act where they were asked to, are counted, and leave a line behind."""

import os

import pytest
import torch

from allstep import Trainer, TrainingArguments
from allstep.errors import NonFiniteGradientsError
from allstep.testing import faults
from allstep.testing.models import Regression, RegressionNet


def train(folder, fault, **more):
    args = TrainingArguments(
        str(folder), **{"save_strategy": "no", **more}, max_steps=5, logging_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(RegressionNet(), args, train_dataset=Regression(80), callbacks=[fault])
    trainer.train()
    return trainer


def test_a_failure_comes_at_its_step_and_is_recorded(tmp_path):
    fault = faults.fail(rank=0, step=3, record=tmp_path / "record")
    with pytest.raises(faults.InjectedError, match="rank 0 fails in step 3"):
        train(tmp_path, fault)
    (line,) = faults.fired(tmp_path / "record")
    assert (line["fault"], line["rank"], line["step"], line["pid"]) == ("fail", 0, 3, os.getpid())
    assert fault.fired == 1


def test_an_error_of_ones_own(tmp_path):
    with pytest.raises(KeyError):
        train(tmp_path, faults.fail(KeyError("mine"), rank=0, step=1))


def test_another_rank_is_left_alone(tmp_path):
    fault = faults.fail(rank=1, step=3)
    assert train(tmp_path, fault).state.global_step == 5
    assert fault.fired == 0


def test_slowness_lasts_as_many_steps_as_asked(tmp_path):
    fault = faults.slow(0.0, steps=2, rank=0, step=2, record=tmp_path / "record")
    train(tmp_path, fault)
    assert [line["step"] for line in faults.fired(tmp_path / "record")] == [2, 3]
    everywhere = faults.slow(0.0, rank=0, step=2)
    train(tmp_path, everywhere)
    assert everywhere.fired == 4


def test_a_hang_may_end(tmp_path):
    assert train(tmp_path, faults.hang(0.01, rank=0, step=2)).state.global_step == 5


def test_nan_comes_once_and_is_gone(tmp_path):
    with pytest.raises(NonFiniteGradientsError, match=r"net\.3\.weight"):
        train(tmp_path, faults.nan("net.3.weight", rank=0, step=4))
    trainer = train(tmp_path, faults.nan(rank=0, step=4), nonfinite_gradients="skip")
    assert trainer.state.skipped_steps == 1


def test_a_flipped_bit_is_one_bit(tmp_path):
    model = RegressionNet()
    before = model.net[0].weight.detach().clone()
    faults.flip_bit(rank=0, step=1, element=2)._act(model=model)
    changed = model.net[0].weight.detach() != before
    assert int(changed.sum()) == 1
    assert changed.view(-1)[2]
    faults.flip_bit(rank=0, step=1, element=2)._act(model=model)
    assert torch.equal(model.net[0].weight, before)


def test_a_full_disk_is_full_for_some_steps_only(tmp_path):
    real = os.fsync
    fault = faults.full_disk(steps=2, rank=0, step=2)
    with pytest.warns(UserWarning, match="No space left on device"):
        train(tmp_path, fault, save_strategy="steps", save_steps=1)
    assert os.fsync is real
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 4, 5)]


def test_only_the_generation_that_was_asked_for_is_hit(tmp_path, monkeypatch):
    fault = faults.fail(rank=0, step=3, restart=1)
    assert train(tmp_path, fault).state.global_step == 5
    monkeypatch.setenv("ALLSTEP_RESTART_COUNT", "1")
    with pytest.raises(faults.InjectedError):
        train(tmp_path / "again", faults.fail(rank=0, step=3, restart=1))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"rank": 0, "step": 0}, "steps from 1"),
        ({"rank": -1, "step": 1}, "ranks count from 0"),
        ({"rank": 0, "step": 1, "event": "on_lunch"}, "on_step_begin"),
    ],
)
def test_a_place_that_is_none_is_refused(where, words):
    with pytest.raises(ValueError, match=words):
        faults.kill(**where)


def test_a_parameter_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no parameter 'nothing'; it has net\.0\.weight"):
        train(tmp_path, faults.flip_bit("nothing", rank=0, step=1))
