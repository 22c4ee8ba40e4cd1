"""The learning rate as a pure function of the step.

`schedule(name, step, ...)` gives the factor by which the base learning rate is multiplied at optimizer step `step`, counted
from 0; `make_scheduler` hangs the same function on an optimizer. The shapes are those named `lr_scheduler_type` in Hugging
Face's TrainingArguments, with the same settings. Cosine and restarts: Loshchilov and Hutter, "SGDR", 2017. Inverse square
root: Vaswani et al., "Attention is all you need", 2017, section 5.3. Warm-up, plateau, decay: Hu et al., "MiniCPM", 2024.

All but `constant` climb linearly from 0 to 1 over the warm-up (`cosine_warmup_with_min_lr` from above 0), then fall from 1 as
their name says. Steps past the end of training keep the last value.

Two schedules are no function of the step, `reduce_lr_on_plateau` and `greedy`: see `trainer/optimization/metric_schedulers.py`.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from allstep._arguments.choices import SCHEDULES_BY_EVALUATION
from allstep.errors import ArgumentsError
from allstep.trainer.optimization.metric_schedulers import make_metric_scheduler

__all__ = ["make_scheduler", "schedule"]


def schedule(name: str, step: int, warmup_steps: int, total_steps: int, *, base_lr: float = 1.0, **kwargs: Any) -> float:
    """The factor of the base learning rate at optimizer step `step`; the first step is 0.

    Args:
        name: a value of `lr_scheduler_type`.
        step: optimizer steps made so far.
        warmup_steps: steps over which the factor climbs to 1.
        total_steps: optimizer steps of the whole run, warm-up included.
        base_lr: the base learning rate, for settings that are rates themselves (`lr_end`, `min_lr`).
        kwargs: further settings of the schedule, `lr_scheduler_kwargs`.

    Raises:
        ArgumentsError: no schedule of that name, or a setting that it does not have.
    """
    return _factor(name, warmup_steps, total_steps, base_lr, kwargs)(step)


def make_scheduler(
    name: str, optimizer: Optimizer, warmup_steps: int, total_steps: int, *, larger_is_better: bool = False, **kwargs: Any
) -> Any:
    """A torch scheduler whose rate at step k is base rate × `schedule(name, k, ...)`; call `step()` after each optimizer step.

    Of `reduce_lr_on_plateau` and `greedy`, which know of no steps, call `step(metric)` after each evaluation.

    Its `state_dict` holds numbers only and loads with `torch.load(weights_only=True)`.

    Args:
        larger_is_better: the direction of the metric, for those that look at one; `mode` in `kwargs` says it too.

    Raises:
        ArgumentsError: no schedule of that name, or a setting that it does not have.
    """
    if name in SCHEDULES_BY_EVALUATION:
        return make_metric_scheduler(name, optimizer, {"mode": "max" if larger_is_better else "min", **kwargs})
    # A nested function, not a callable object: LambdaLR leaves functions out of its state_dict (test_schedulers.py).
    return LambdaLR(optimizer, _factor(name, warmup_steps, total_steps, float(optimizer.defaults["lr"]), kwargs))


def _factor(name: str, warmup_steps: int, total_steps: int, base_lr: float, settings: dict[str, Any]) -> Callable[[int], float]:
    """Check the settings once; what is left is a function of the step."""
    if name not in _SHAPES:
        raise ArgumentsError(f"lr_scheduler_type={name!r}: expected one of {', '.join([*_SHAPES, *SCHEDULES_BY_EVALUATION])}.")
    shape = _SHAPES[name]
    takes = list(inspect.signature(shape).parameters)[len(_GIVEN) :]
    unknown = [setting for setting in settings if setting not in takes]
    if unknown:
        raise ArgumentsError(
            f"lr_scheduler_kwargs of {name!r}: found {', '.join(unknown)}, expected "
            f"{'only ' + ', '.join(takes) if takes else 'none; leave it out'}."
        )
    return shape(warmup_steps, total_steps, base_lr, **settings)


# ---- shapes: (warm-up steps, total steps, base learning rate, settings) → factor as a function of the step

_GIVEN = ("warmup_steps", "total_steps", "base_lr")


def _warmed_up(warmup_steps: int, then: Callable[[int], float]) -> Callable[[int], float]:
    """Linear from 0 to 1 over the warm-up, then `then`, a function of the step."""
    return lambda step: step / warmup_steps if step < warmup_steps else then(step)


def _falling(warmup_steps: int, total_steps: int, curve: Callable[[float], float]) -> Callable[[int], float]:
    """Warm-up, then `curve` of the share of the remaining steps that is done, 0 to 1."""
    length = total_steps - warmup_steps
    return _warmed_up(warmup_steps, lambda step: max(0.0, curve((step - warmup_steps) / length if step < total_steps else 1.0)))


def _half_wave(turns: float) -> float:
    """A cosine moved to 0..1: 1 at 0 turns, 0 at half a turn, 1 at a whole one."""
    return 0.5 * (1.0 + math.cos(2.0 * math.pi * turns))


def _constant(warmup_steps: int, total_steps: int, base_lr: float) -> Callable[[int], float]:
    return lambda step: 1.0


def _constant_with_warmup(warmup_steps: int, total_steps: int, base_lr: float) -> Callable[[int], float]:
    return _warmed_up(warmup_steps, lambda step: 1.0)


def _linear(warmup_steps: int, total_steps: int, base_lr: float) -> Callable[[int], float]:
    return _falling(warmup_steps, total_steps, lambda done: 1.0 - done)


def _cosine(warmup_steps: int, total_steps: int, base_lr: float, num_cycles: float = 0.5) -> Callable[[int], float]:
    return _falling(warmup_steps, total_steps, lambda done: _half_wave(num_cycles * done))


def _cosine_with_restarts(warmup_steps: int, total_steps: int, base_lr: float, num_cycles: float = 1) -> Callable[[int], float]:
    # Each cycle is half a wave; the very end is the end of a cycle, not the start of the next.
    return _falling(warmup_steps, total_steps, lambda done: _half_wave(0.5 * (num_cycles * done % 1.0)) if done < 1.0 else 0.0)


def _cosine_with_min_lr(
    warmup_steps: int,
    total_steps: int,
    base_lr: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Callable[[int], float]:
    floor = _floor("cosine_with_min_lr", base_lr, min_lr, min_lr_rate)
    return _falling(warmup_steps, total_steps, lambda done: floor + (1.0 - floor) * _half_wave(num_cycles * done))


def _cosine_warmup_with_min_lr(
    warmup_steps: int,
    total_steps: int,
    base_lr: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Callable[[int], float]:
    """One step ahead of `cosine_with_min_lr`: the first step already moves, and the last one reaches the floor."""
    floor = _floor("cosine_warmup_with_min_lr", base_lr, min_lr, min_lr_rate)
    length = max(1, total_steps - warmup_steps)

    def factor(step: int) -> float:
        if step >= warmup_steps:
            done = min(1.0, (step - warmup_steps + 1) / length)
            return max(0.0, floor + (1.0 - floor) * _half_wave(num_cycles * done))
        if warmup_lr_rate is None:
            return (step + 1) / warmup_steps
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, warmup_steps - 1)

    return factor


def _floor(name: str, base_lr: float, min_lr: float | None, min_lr_rate: float | None) -> float:
    """The share of the base learning rate below which a schedule does not fall, given as a rate or as a share."""
    if (min_lr is None) == (min_lr_rate is None):
        raise ArgumentsError(
            f"lr_scheduler_kwargs of {name!r}: found min_lr={min_lr} and min_lr_rate={min_lr_rate}, expected one "
            f'of them: {{"min_lr": a learning rate}} or {{"min_lr_rate": a share of learning_rate}}.'
        )
    if min_lr is not None and not 0 <= min_lr < base_lr:
        raise ArgumentsError(f"min_lr={min_lr} of {name!r}: expected 0 to learning_rate={base_lr}.")
    floor = min_lr_rate if min_lr is None else min_lr / base_lr
    assert floor is not None  # one of the two is given
    return floor


def _polynomial(
    warmup_steps: int, total_steps: int, base_lr: float, lr_end: float = 1e-7, power: float = 1.0
) -> Callable[[int], float]:
    if lr_end >= base_lr:
        raise ArgumentsError(f"lr_end={lr_end} of 'polynomial': expected less than learning_rate={base_lr}, it falls to it.")
    floor = lr_end / base_lr
    return _falling(warmup_steps, total_steps, lambda done: floor + (1.0 - floor) * (1.0 - done) ** power)


def _inverse_sqrt(
    warmup_steps: int, total_steps: int, base_lr: float, timescale: float | None = None
) -> Callable[[int], float]:
    scale = timescale or warmup_steps or 10_000  # steps after which the factor is 1 / sqrt(2)
    return _warmed_up(warmup_steps, lambda step: 1.0 / math.sqrt(1.0 + (step - warmup_steps) / scale))


def _warmup_stable_decay(
    warmup_steps: int,
    total_steps: int,
    base_lr: float,
    num_decay_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Callable[[int], float]:
    rises: dict[str, Callable[[float], float]] = {
        "linear": lambda done: done,
        "cosine": lambda done: 1.0 - _half_wave(0.5 * done),
        "1-sqrt": lambda done: 1.0 - math.sqrt(1.0 - done),
    }
    falls: dict[str, Callable[[float], float]] = {
        "linear": lambda done: 1.0 - done,
        "cosine": lambda done: _half_wave(num_cycles * done),
        "1-sqrt": lambda done: 1.0 - math.sqrt(done),
    }
    for setting, found, curves in (("warmup_type", warmup_type, rises), ("decay_type", decay_type, falls)):
        if found not in curves:
            raise ArgumentsError(f"{setting}={found!r} of 'warmup_stable_decay': expected one of {', '.join(curves)}.")
    if num_decay_steps is None:
        raise ArgumentsError(
            "lr_scheduler_kwargs of 'warmup_stable_decay': found no num_decay_steps, expected the optimizer steps of the "
            'decay, such as {"num_decay_steps": 100}.'
        )
    stable = total_steps - warmup_steps - num_decay_steps if num_stable_steps is None else num_stable_steps
    if stable < 0:
        raise ArgumentsError(
            f"num_decay_steps={num_decay_steps} of 'warmup_stable_decay': expected at most {total_steps - warmup_steps}, the "
            f"steps left of {total_steps} after {warmup_steps} of warm-up."
        )
    decay_begin = warmup_steps + stable

    def factor(step: int) -> float:
        if step < warmup_steps:
            share = rises[warmup_type](step / warmup_steps)
        elif step < decay_begin:
            share = 1.0
        elif step < decay_begin + num_decay_steps:
            share = falls[decay_type]((step - decay_begin) / num_decay_steps)
        else:
            share = 0.0
        return max(0.0, min_lr_ratio + (1.0 - min_lr_ratio) * share)

    return factor


_SHAPES: dict[str, Callable[..., Callable[[int], float]]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}
