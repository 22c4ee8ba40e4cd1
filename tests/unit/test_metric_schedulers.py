"""Schedules that look at a metric: the rates of the classes they are drop-ins for, their state, and who is given a metric."""

import io
import random

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from allstep.comm.communicator import SoloCommunicator
from allstep.errors import ArgumentsError
from allstep.trainer.optimization.metric_schedulers import GreedyLR, advance, advance_by_metric, takes_metric
from allstep.trainer.optimization.schedulers import make_scheduler


def optimizer(*rates):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates or (0.5,)], lr=1.0)


def rates_of(target):
    return [group["lr"] for group in target.param_groups]


def metrics(seed, length=400):
    """A noisy curve that falls, stands still, and rises."""
    chance = random.Random(seed)
    return [abs(1.0 - at / length) + 0.02 * chance.random() * (at % 7) for at in range(length)]


SETTINGS = [
    {},
    {"patience": 1},
    {"patience": 0, "factor": 0.5, "min_lr": 0.01, "reset_start": 3},
    {"patience": 2, "mode": "max", "max_lr": 0.7, "min_lr": [0.1, 0.2]},
    {"patience": 1, "threshold": 0.01, "threshold_mode": "rel", "cooldown": 3, "warmup": 2},
    {"patience": 1, "threshold": 0.01, "threshold_mode": "rel", "mode": "max", "cooldown": 2, "reset_start": 2, "min_lr": 0.4},
    {"patience": 1, "smooth": True, "window_size": 5, "min_lr": 1e-4},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("rates", [(0.5, 0.25), (5e-5, 5e-4)], ids=str)
def test_greedy_gives_the_rates_of_transformers_also_after_a_resume(settings, rates):
    theirs = pytest.importorskip("transformers.optimization", reason="compared with transformers")
    own, other = optimizer(*rates), optimizer(*rates)
    schedule, reference = GreedyLR(own, **settings), theirs.GreedyLR(other, **settings)
    seen = set()
    for at, metric in enumerate(metrics(len(settings))):
        schedule.step(metric)
        reference.step(metric)
        assert rates_of(own) == rates_of(other)
        assert schedule.get_last_lr() == reference.get_last_lr()
        seen.add(tuple(rates_of(own)))
        if at == 150:
            file = io.BytesIO()
            torch.save(schedule.state_dict(), file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
            assert state.keys() == reference.state_dict().keys()
            own = optimizer(*rates)
            schedule = GreedyLR(own)
            schedule.load_state_dict(state)
    assert len(seen) > 3 or rates[0] < 1e-3 or not settings


def test_the_state_of_transformers_is_gone_on_from():
    theirs = pytest.importorskip("transformers.optimization", reason="compared with transformers")
    own, other = optimizer(0.5), optimizer(0.5)
    reference = theirs.GreedyLR(other, patience=1, smooth=True)
    assert takes_metric(reference)
    for metric in metrics(1)[:100]:
        reference.step(metric)
    schedule = GreedyLR(own)
    schedule.load_state_dict(reference.state_dict())
    for metric in metrics(1)[100:]:
        schedule.step(metric)
        reference.step(metric)
        assert rates_of(own) == pytest.approx(rates_of(other))


def test_plateau_is_torchs_and_greedy_goes_the_way_that_is_better():
    made = make_scheduler("reduce_lr_on_plateau", optimizer(), 0, 100, patience=3, factor=0.3)
    assert type(made) is ReduceLROnPlateau
    assert (made.mode, made.patience, made.factor) == ("min", 3, 0.3)
    assert make_scheduler("reduce_lr_on_plateau", optimizer(), 0, 100, larger_is_better=True).mode == "max"
    assert make_scheduler("greedy", optimizer(), 0, 100, larger_is_better=True).mode == "max"
    assert make_scheduler("greedy", optimizer(), 0, 100, larger_is_better=True, mode="min").mode == "min"


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("reduce_lr_on_plateau", {"patients": 3}, "'reduce_lr_on_plateau': found patients, expected only mode, factor, "),
        ("reduce_lr_on_plateau", {"factor": 2}, "lr_scheduler_kwargs of 'reduce_lr_on_plateau': Factor should be < 1.0"),
        ("greedy", {"patients": 3}, "'greedy': found patients, expected only mode, factor, "),
        ("greedy", {"factor": 2}, "factor=2: expected above 0 and below 1"),
        ("greedy", {"mode": "up"}, "mode='up': expected 'min' or 'max'"),
        ("greedy", {"threshold_mode": "up"}, "threshold_mode='up': expected 'rel' or 'abs'"),
        ("greedy", {"min_lr": [0.1, 0.2, 0.3]}, "min_lr has 3 rates: expected 1, one for each group of parameters"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(name, settings, sentence):
    with pytest.raises(ArgumentsError) as error:
        make_scheduler(name, optimizer(), 0, 10, **settings)
    assert sentence in str(error.value)


class OwnSchedule:
    """Somebody's, with neither base class."""

    def __init__(self):
        self.seen = []

    def step(self, value):
        self.seen.append(value)


def test_who_looks_at_a_metric_hears_of_evaluations_alone_and_others_of_steps_alone():
    target = optimizer()
    by_step, own = make_scheduler("linear", target, 0, 10), OwnSchedule()
    assert [takes_metric(each) for each in (by_step, own)] == [False, True]
    target.step()
    for each in (by_step, own):
        advance(each)
        advance_by_metric(each, {"eval_loss": 2.0, "eval_acc": 0.5}, "acc", SoloCommunicator())
    assert by_step.last_epoch == 1
    assert own.seen == [0.5]
    advance_by_metric(own, {"eval_loss": 2.0}, None, SoloCommunicator())
    assert own.seen == [0.5, 2.0]
    with pytest.raises(KeyError, match="goes by metric_for_best_model='f1', but the evaluation gave eval_acc, eval_loss"):
        advance_by_metric(own, {"eval_loss": 2.0, "eval_acc": 0.5}, "f1", SoloCommunicator())
