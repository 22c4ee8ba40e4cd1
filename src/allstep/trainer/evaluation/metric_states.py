"""Metrics that are kept as a state: updated with every batch, merged over ranks, computed once. No logits are gathered.

Any object will do that has `update(predictions, labels)`, `merge_state(others)` and `compute()`: torcheval's metrics are such,
torchmetrics' nearly.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard

import torch

from allstep.comm.agreement import failing_together
from allstep.comm.communicator import Communicator

__all__ = ["MetricState", "MetricStates", "check_metrics", "states_of"]

_SOUND = frozenset({"dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat"})
"""Reductions of torchmetrics by which merged states are those of all data at once; its mean counts updates, not samples."""


class MetricState(Protocol):
    """What a metric has to have."""

    def update(self, predictions: Any, labels: Any, /) -> Any:
        """Take in a batch: what the model said and its labels, on the model's device."""

    def merge_state(self, others: Any, /) -> Any:
        """Take in the states of several others, a list in rank order."""

    def compute(self) -> Any:
        """The metric: a number, or a dict of them."""


def states_of(compute_metrics: Any) -> dict[str, MetricState] | None:
    """Name -> metric where those are states, with "" for the name of one that was given alone; None for a function."""
    if _is_state(compute_metrics):
        return {"": compute_metrics}
    return dict(compute_metrics) if isinstance(compute_metrics, Mapping) else None


def check_metrics(compute_metrics: Any) -> None:
    """Refuse what cannot compute metrics.

    Raises:
        TypeError: it is neither None, a function, a metric, nor a dict of metrics.
    """
    if isinstance(compute_metrics, Mapping):
        wrong = {name: each for name, each in compute_metrics.items() if not _is_state(each)}
        if not wrong:
            return
        name, each = next(iter(wrong.items()))
        raise TypeError(
            f"compute_metrics[{name!r}] is {type(each).__name__}; expected an object with update(predictions, labels), "
            f"merge_state(others) and compute()."
        )
    if compute_metrics is not None and not callable(compute_metrics) and not _is_state(compute_metrics):
        raise TypeError(
            f"compute_metrics is {type(compute_metrics).__name__}; expected a function of an EvalPrediction, or an object, or "
            f"a dict of objects, with update(predictions, labels), merge_state(others) and compute()."
        )


def _is_state(value: Any) -> TypeGuard[MetricState]:
    return all(callable(getattr(value, name, None)) for name in ("update", "merge_state", "compute"))


class MetricStates:
    """The metrics of one evaluation on one rank; those that were given are left as they are.

    Args:
        given: name -> metric, as `states_of` gives it.
        device: where the model is.
    """

    def __init__(self, given: Mapping[str, MetricState], device: torch.device) -> None:
        self._states: dict[str, Any] = {name: _moved(copy.deepcopy(state), device) for name, state in given.items()}
        self._batches = 0

    def update(self, predictions: Any, labels: Any) -> None:
        """Take in a batch of this rank."""
        self._batches += 1
        for state in self._states.values():
            state.update(predictions, labels)

    def compute(self, communicator: Communicator) -> dict[str, Any]:
        """Collective. The metrics over all ranks, on every rank.

        Raises:
            ValueError: a metric cannot be merged, or gave a number without a name.
            RankFailedError: another rank could not compute them.
        """
        with failing_together(communicator, "computing metrics"):
            own = {name: _sendable(name, state, communicator.size) for name, state in self._states.items()}
        ranks = [states for batches, states in communicator.all_gather_object((self._batches, own)) if batches]
        computed: dict[str, Any] = {}
        with failing_together(communicator, "computing metrics"):
            for name in own:
                computed |= _named(name, _merged([states[name] for states in ranks] or [own[name]]).compute())
        return computed


def _moved(state: Any, device: torch.device) -> Any:
    move: Callable[..., Any] | None = getattr(state, "to", None)
    if move is not None:
        state = move(device)
    return state


def _sendable(name: str, state: Any, size: int) -> Any:
    """`state` on the CPU; one of torchmetrics is kept from gathering over ranks by itself, which would count them twice."""
    reductions = getattr(state, "_reductions", None)
    if size > 1 and hasattr(state, "sync_on_compute") and isinstance(reductions, dict):
        wrong = [key for key, each in reductions.items() if getattr(each, "__name__", "") not in _SOUND]
        if wrong or getattr(state, "full_state_update", False) is not False:
            raise ValueError(
                f"The metric {name or type(state).__name__!r} cannot be merged over ranks: "
                f"{'its state ' + wrong[0] + ' has no sum, maximum, minimum or list' if wrong else 'full_state_update is set'}"
                f". Give compute_metrics a function of an EvalPrediction instead."
            )
        state.distributed_available_fn = _never
    return _moved(state, torch.device("cpu"))


def _never() -> bool:
    return False


def _merged(states: list[Any]) -> Any:
    """The state of all, in rank order."""
    if hasattr(states[0], "sync_on_compute"):  # torchmetrics takes one at a time, and puts it before what is there
        last = states[-1]
        for state in reversed(states[:-1]):
            last.merge_state(state)
        return last
    if len(states) > 1:
        states[0].merge_state(states[1:])
    return states[0]


def _named(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}" if name else str(key): _plain(each) for key, each in value.items()}
    if not name:
        raise ValueError(
            "compute_metrics is one metric whose compute() gives no dict, so that what it gives has no name. Name it: "
            'compute_metrics={"accuracy": metric}.'
        )
    return {name: _plain(value)}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
