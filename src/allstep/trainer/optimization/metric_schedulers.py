"""Schedules that look at a metric: they hear of each evaluation, not of each step.

`reduce_lr_on_plateau` is torch's own class. `greedy` also raises the rate while the metric gets better: "GreedyLR: A Novel
Adaptive Learning Rate Scheduler", 2025 (arXiv 2512.14527), with the settings and the state of transformers' class.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from allstep.comm.communicator import Communicator
from allstep.errors import ArgumentsError

__all__ = ["GreedyLR", "advance", "advance_by_metric", "make_metric_scheduler", "takes_metric"]


class GreedyLR:
    """Raises the rate after more than `patience` evaluations in a row that were each the best, and lowers it after more than
    `patience` that were not.

    Args:
        optimizer: its groups have the rates that are changed.
        mode: "min" where a smaller metric is better, else "max".
        factor: what the rate is multiplied by to lower it, and divided by to raise it; above 0 and below 1.
        patience: evaluations that are waited for.
        threshold: by how much the best has to be beaten; a share of it with `threshold_mode="rel"`.
        cooldown: evaluations that are passed over after the rate was lowered.
        warmup: those after it was raised.
        min_lr: the lowest rate, one for all groups or one for each.
        max_lr: the highest.
        eps: smaller changes of the rate are not made.
        verbose: accepted for compatibility; the rate is in the log.
        smooth: look at the mean of the last `window_size` metrics.
        reset_start: times that the rate would have been lowered at `min_lr`; then all begins anew.

    Raises:
        ValueError: a setting that cannot be.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | list[float] = 1e-3,
        max_lr: float | list[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"factor={factor}: expected above 0 and below 1")
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}: expected 'min' or 'max'")
        if threshold_mode not in ("rel", "abs"):
            raise ValueError(f"threshold_mode={threshold_mode!r}: expected 'rel' or 'abs'")
        self.optimizer = optimizer
        self.mode, self.factor, self.patience, self.eps, self.verbose = mode, factor, patience, eps, verbose
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.cooldown, self.warmup = cooldown, warmup
        self.min_lrs, self.max_lrs = self._for_groups("min_lr", min_lr), self._for_groups("max_lr", max_lr)
        self.smooth, self.window_size = smooth, window_size
        self.reset_start_original = reset_start
        self.last_epoch = 0
        self._init_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._last_lr = list(self._init_lrs)
        self._begin()

    def _for_groups(self, name: str, given: float | list[float]) -> list[float]:
        groups = len(self.optimizer.param_groups)
        rates = list(given) if isinstance(given, (list, tuple)) else [given] * groups
        if len(rates) != groups:
            raise ValueError(f"{name} has {len(rates)} rates: expected {groups}, one for each group of parameters")
        return rates

    def _begin(self) -> None:
        """Nothing is known yet."""
        self.best = float("inf" if self.mode == "min" else "-inf")
        self.num_bad_epochs = self.num_good_epochs = 0
        self.cooldown_counter = self.warmup_counter = 0
        self.reset_start = self.reset_start_original
        self._values: list[float] = []

    def step(self, metrics: float, epoch: int | None = None) -> None:
        """An evaluation gave the number `metrics`."""
        current = self._smoothed(float(metrics))
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter > 0 or self.warmup_counter > 0:
            if self.cooldown_counter > 0:
                self.cooldown_counter -= 1
            else:
                self.warmup_counter -= 1
            self.num_bad_epochs = self.num_good_epochs = 0
        else:
            self._count(current)
        self._last_lr = self._rates()

    def _count(self, current: float) -> None:
        if self._is_better(current):
            self.best = current
            self.num_good_epochs, self.num_bad_epochs = self.num_good_epochs + 1, 0
        else:
            self.num_good_epochs, self.num_bad_epochs = 0, self.num_bad_epochs + 1
        if self.num_good_epochs > self.patience:
            for group, most in zip(self.optimizer.param_groups, self.max_lrs, strict=True):
                rate = min(float(group["lr"]) / self.factor, most)
                group["lr"] = rate if rate - group["lr"] > self.eps else group["lr"]
            self.num_good_epochs, self.warmup_counter = 0, self.warmup
            self.reset_start = self.reset_start_original
        elif self.num_bad_epochs > self.patience:
            for group, least in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
                rate = max(float(group["lr"]) * self.factor, least)
                group["lr"] = rate if group["lr"] - rate > self.eps else group["lr"]
            self._reset_if_stuck()
            self.num_bad_epochs, self.cooldown_counter = 0, self.cooldown

    def _smoothed(self, value: float) -> float:
        if not self.smooth:
            return value
        self._values = [*self._values, value][-self.window_size :]
        return sum(self._values) / len(self._values)

    def _is_better(self, current: float) -> bool:
        by = self.threshold if self.mode == "max" else -self.threshold
        bound = self.best * (1.0 + by) if self.threshold_mode == "rel" else self.best + by
        return current > bound if self.mode == "max" else current < bound

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _reset_if_stuck(self) -> None:
        if any(rate > least for rate, least in zip(self._rates(), self.min_lrs, strict=True)):
            return
        self.reset_start -= 1
        if self.reset_start <= 0:
            for group, rate in zip(self.optimizer.param_groups, self._init_lrs, strict=True):
                group["lr"] = rate
            self._begin()

    def get_last_lr(self) -> list[float]:
        """The rates after the last evaluation."""
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        """Numbers and texts only."""
        state = {name: value for name, value in vars(self).items() if name not in ("optimizer", "_values")}
        if self.smooth:
            state["_streaming_avg"] = {"window_size": self.window_size, "values": self._values, "sum": sum(self._values)}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, also with its settings, as torch's schedulers do."""
        for name, value in state_dict.items():
            if name == "_streaming_avg":
                self._values = list(value["values"])
            else:
                setattr(self, name, value)
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def make_metric_scheduler(name: str, optimizer: Optimizer, settings: Mapping[str, Any]) -> ReduceLROnPlateau | GreedyLR:
    """The schedule `name`, one of `SCHEDULES_BY_EVALUATION`.

    Raises:
        ArgumentsError: a setting that it does not have, or a value that cannot be.
    """
    maker: Any = ReduceLROnPlateau if name == "reduce_lr_on_plateau" else GreedyLR
    takes = list(inspect.signature(maker).parameters)[1:]
    unknown = [setting for setting in settings if setting not in takes]
    if unknown:
        raise ArgumentsError(f"lr_scheduler_kwargs of {name!r}: found {', '.join(unknown)}, expected only {', '.join(takes)}.")
    try:
        made: ReduceLROnPlateau | GreedyLR = maker(optimizer, **settings)
    except (TypeError, ValueError) as error:
        raise ArgumentsError(f"lr_scheduler_kwargs of {name!r}: {error}.") from error
    return made


def takes_metric(scheduler: object) -> bool:
    """Whether `scheduler.step` has to be given a metric, as those of torch's ReduceLROnPlateau and of `GreedyLR` have."""
    return _needs_argument(type(scheduler))  # type: ignore[arg-type]  # classes can be hashed


@functools.lru_cache(maxsize=64)  # a signature takes longer to read than a small model's step (asked after each step)
def _needs_argument(kind: type) -> bool:
    step = getattr(kind, "step", None)
    parameters = [] if step is None else list(inspect.signature(step).parameters.values())[1:]
    first = parameters[0] if parameters else None
    return (
        first is not None
        and first.default is first.empty
        and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    )


def advance(scheduler: Any) -> None:
    """An optimizer step was taken; schedules that look at a metric wait for the next evaluation."""
    if not takes_metric(scheduler):
        scheduler.step()


def advance_by_metric(scheduler: Any, metrics: Mapping[str, float], name: str | None, communicator: Communicator) -> None:
    """Collective where `scheduler` looks at a metric: step it with that of an evaluation, on every rank with rank 0's value.

    Args:
        name: `metric_for_best_model`; None is the loss.

    Raises:
        KeyError: there is no such metric.
    """
    if not takes_metric(scheduler):
        return
    key = "loss" if name is None else name
    key = key if key.startswith("eval_") else f"eval_{key}"
    if key not in metrics:
        raise KeyError(
            f"The learning rate goes by metric_for_best_model={name!r}, but the evaluation gave {', '.join(sorted(metrics))}."
        )
    scheduler.step(communicator.broadcast_object(metrics[key]))
