"""Schedules: values worked out by hand, properties that hold for every step, and the torch scheduler made of them."""

import io
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep._arguments.choices import SCHEDULES, SCHEDULES_BY_EVALUATION
from allstep.errors import ArgumentsError
from allstep.trainer.optimization.schedulers import make_scheduler, schedule

OF_STEPS = [name for name in SCHEDULES if name not in SCHEDULES_BY_EVALUATION]

NEEDED: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.0},
    "warmup_stable_decay": {"num_decay_steps": 5},
}


def optimizer(lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)


@pytest.mark.parametrize(
    ("name", "step", "kwargs", "factor"),
    [
        # 10 steps of warm-up, 110 in all: 100 steps of decay
        ("linear", 0, {}, 0.0),
        ("linear", 5, {}, 0.5),
        ("linear", 10, {}, 1.0),
        ("linear", 60, {}, 0.5),
        ("linear", 109, {}, 0.01),
        ("linear", 110, {}, 0.0),
        ("linear", 200, {}, 0.0),
        ("cosine", 35, {}, 0.5 + math.sqrt(2) / 4),
        ("cosine", 60, {}, 0.5),
        ("cosine", 110, {}, 0.0),
        ("cosine", 60, {"num_cycles": 1}, 0.0),
        ("cosine", 110, {"num_cycles": 1}, 1.0),
        ("cosine_with_restarts", 60, {}, 0.5),
        ("cosine_with_restarts", 35, {"num_cycles": 2}, 0.5),
        ("cosine_with_restarts", 60, {"num_cycles": 2}, 1.0),
        ("cosine_with_restarts", 85, {"num_cycles": 2}, 0.5),
        ("cosine_with_restarts", 110, {"num_cycles": 2}, 0.0),
        ("polynomial", 60, {"lr_end": 0.1, "power": 2.0}, 0.1 + 0.9 * 0.25),
        ("polynomial", 110, {"lr_end": 0.1}, 0.1),
        ("polynomial", 500, {"lr_end": 0.1}, 0.1),
        ("constant", 0, {}, 1.0),
        ("constant", 500, {}, 1.0),
        ("constant_with_warmup", 5, {}, 0.5),
        ("constant_with_warmup", 500, {}, 1.0),
        ("inverse_sqrt", 5, {}, 0.5),
        ("inverse_sqrt", 10, {}, 1.0),
        ("inverse_sqrt", 40, {}, 0.5),
        ("inverse_sqrt", 310, {"timescale": 100}, 0.5),
        ("cosine_with_min_lr", 60, {"min_lr_rate": 0.2}, 0.6),
        ("cosine_with_min_lr", 110, {"min_lr": 0.2}, 0.2),
        ("warmup_stable_decay", 5, {"num_decay_steps": 20, "min_lr_ratio": 0.2}, 0.6),
        ("warmup_stable_decay", 5, {"num_decay_steps": 20, "warmup_type": "cosine"}, 0.5),
        ("warmup_stable_decay", 9, {"num_decay_steps": 20, "warmup_type": "1-sqrt"}, 1 - math.sqrt(0.1)),
        ("warmup_stable_decay", 89, {"num_decay_steps": 20}, 1.0),
        ("warmup_stable_decay", 100, {"num_decay_steps": 20}, 0.5),
        ("warmup_stable_decay", 95, {"num_decay_steps": 20, "decay_type": "linear"}, 0.75),
        ("warmup_stable_decay", 95, {"num_decay_steps": 20, "decay_type": "1-sqrt"}, 0.5),
        ("warmup_stable_decay", 30, {"num_decay_steps": 20, "num_stable_steps": 10}, 0.5),
        ("warmup_stable_decay", 110, {"num_decay_steps": 20, "min_lr_ratio": 0.2}, 0.2),
    ],
    ids=str,
)
def test_values_worked_out_by_hand(name: str, step: int, kwargs: dict[str, Any], factor: float) -> None:
    assert schedule(name, step, 10, 110, **kwargs) == pytest.approx(factor, abs=1e-12)


def test_inverse_sqrt_without_warmup_uses_ten_thousand_steps() -> None:
    assert schedule("inverse_sqrt", 0, 0, 100) == 1.0
    assert schedule("inverse_sqrt", 30_000, 0, 100) == pytest.approx(0.5)


def test_names_are_those_that_the_arguments_accept() -> None:
    with pytest.raises(ArgumentsError, match="lr_scheduler_type='triangle': expected one of ") as error:
        schedule("triangle", 0, 0, 10)
    assert set(str(error.value).split("one of ")[1].rstrip(".").split(", ")) == set(SCHEDULES)
    transformers = pytest.importorskip("transformers", reason="compared with transformers")
    assert set(SCHEDULES) == {each.value for each in transformers.SchedulerType}
    for name in OF_STEPS:
        assert schedule(name, 0, 0, 10, **NEEDED.get(name, {})) in (1.0, pytest.approx(0.978, abs=1e-3))


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine", {"num_cycles": 1.3}),
        ("cosine_with_restarts", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", {}),
        ("polynomial", {"lr_end": 0.01, "power": 2.5}),
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {}),
        ("inverse_sqrt", {"timescale": 50}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_with_min_lr", {"min_lr": 0.02, "num_cycles": 1.0}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_warmup_with_min_lr", {"min_lr": 0.02, "warmup_lr_rate": 0.3, "num_cycles": 1.0}),
        ("warmup_stable_decay", {"num_decay_steps": 10}),
        ("warmup_stable_decay", {"num_decay_steps": 9, "decay_type": "1-sqrt", "warmup_type": "1-sqrt", "min_lr_ratio": 0.1}),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 15, "num_stable_steps": 12, "decay_type": "linear", "warmup_type": "cosine"},
        ),
    ],
    ids=str,
)
def test_rates_are_those_of_transformers_over_the_whole_run(name: str, kwargs: dict[str, Any], warmup: int) -> None:
    transformers = pytest.importorskip("transformers", reason="compared with transformers")
    own, other, total = optimizer(), optimizer(), 41
    scheduler = make_scheduler(name, own, warmup, total, **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Both num_training_steps and num_stable_steps")
        reference = transformers.get_scheduler(name, other, warmup, total, kwargs)
    for step in range(total):
        assert own.param_groups[0]["lr"] == pytest.approx(other.param_groups[0]["lr"], rel=1e-12, abs=1e-17), step
        for each in (own, scheduler, other, reference):
            each.step()


@given(
    name=st.sampled_from(OF_STEPS),
    warmup_steps=st.integers(0, 50),
    length=st.integers(0, 100),
    step=st.integers(0, 400),
)
def test_factor_stays_between_zero_and_one_and_climbs_in_warmup(name: str, warmup_steps: int, length: int, step: int) -> None:
    total = warmup_steps + length
    kwargs = {"num_decay_steps": length} if name == "warmup_stable_decay" else NEEDED.get(name, {})
    factor = schedule(name, step, warmup_steps, total, **kwargs)
    assert 0.0 <= factor <= 1.0
    if step < warmup_steps and name not in ("constant", "cosine_warmup_with_min_lr"):
        assert factor == step / warmup_steps
    if total <= step and name != "inverse_sqrt":
        assert factor == schedule(name, total + 1000, warmup_steps, total, **kwargs)


@pytest.mark.parametrize("name", OF_STEPS)
def test_torch_scheduler_follows_the_pure_function(name: str) -> None:
    target, kwargs = optimizer(lr=0.5), NEEDED.get(name, {})
    scheduler = make_scheduler(name, target, 3, 12, **kwargs)
    for step in range(15):
        expected = 0.5 * schedule(name, step, 3, 12, base_lr=0.5, **kwargs)
        assert target.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12)
        target.step()
        scheduler.step()


def test_rates_among_the_settings_are_absolute() -> None:
    target = optimizer(lr=0.5)
    scheduler = make_scheduler("cosine_with_min_lr", target, 0, 4, min_lr=0.05)
    for _ in range(4):
        target.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.05)]
    with pytest.raises(ArgumentsError, match=r"lr_end=0\.5 of 'polynomial': expected less than learning_rate=0\.5"):
        make_scheduler("polynomial", target, 0, 4, lr_end=0.5)
    with pytest.raises(ArgumentsError, match=r"min_lr=0\.6"):
        make_scheduler("cosine_with_min_lr", target, 0, 4, min_lr=0.6)


@pytest.mark.parametrize("name", OF_STEPS)
def test_state_loads_without_pickled_code_and_continues_bit_for_bit(name: str) -> None:
    first, kwargs = optimizer(), NEEDED.get(name, {})
    scheduler = make_scheduler(name, first, 3, 12, **kwargs)
    for _ in range(5):
        first.step()
        scheduler.step()
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    second = optimizer()
    resumed = make_scheduler(name, second, 3, 12, **kwargs)
    second.load_state_dict(state["optimizer"])
    resumed.load_state_dict(state["scheduler"])
    with warnings.catch_warnings():
        # torch counts steps on the optimizer object, so a resumed one looks as if it had made none
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(6):
            assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"]
            first.step()
            scheduler.step()
            second.step()
            resumed.step()


@pytest.mark.parametrize(
    ("name", "kwargs", "sentence"),
    [
        ("linear", {"num_cycles": 2}, "of 'linear': found num_cycles, expected none; leave it out"),
        ("cosine", {"cycles": 2}, "of 'cosine': found cycles, expected only num_cycles"),
        ("cosine_with_min_lr", {}, "expected one of them"),
        ("cosine_with_min_lr", {"min_lr": 0.1, "min_lr_rate": 0.1}, "expected one of them"),
        ("warmup_stable_decay", {}, "found no num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 200}, "expected at most 100, the steps left of 110 after 10"),
        ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "cubic"}, "decay_type='cubic'"),
    ],
    ids=str,
)
def test_settings_that_a_schedule_does_not_take_are_refused(name: str, kwargs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArgumentsError) as error:
        make_scheduler(name, optimizer(), 10, 110, **kwargs)
    assert sentence in str(error.value)
