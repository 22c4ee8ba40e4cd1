"""What becomes of `compute_metrics` in one evaluation: called with everything, with each batch, or kept as a state."""

from collections.abc import Sequence
from typing import Any

import torch

from allstep.comm.agreement import failing_together
from allstep.comm.communicator import Communicator
from allstep.trainer.evaluation.evaluate import EvalPrediction, EvaluationResult, Prediction, Rounds
from allstep.trainer.evaluation.metric_states import MetricStates, states_of

__all__ = ["Metrics"]


class Metrics:
    """The metrics of one evaluation.

    Args:
        given: the Trainer's `compute_metrics`; None for none.
        device: where the model is.
        by_batch: call a function with each batch (`batch_eval_metrics`).
        keeps_rows: predictions and labels are wanted for themselves.
        include: what a function is given besides them: "inputs", "loss".
    """

    def __init__(self, given: Any, device: torch.device, *, by_batch: bool, keeps_rows: bool, include: Sequence[str]) -> None:
        states = states_of(given)
        self._states = None if states is None else MetricStates(states, device)
        self._function = given if states is None else None
        self._by_batch, self._in_rounds = by_batch, by_batch and not keeps_rows and self._function is not None
        rows = frozenset({"predictions", "label_ids"})
        self._parts = rows | frozenset(include)
        self._computed: dict[str, Any] = {}
        self.keep = self._parts if self._function is not None else rows if keeps_rows else frozenset()
        """What the evaluation has to gather."""
        if self._in_rounds:
            self.keep = frozenset()

    def rounds(self) -> Rounds | None:
        """How every rank sees each batch, where it has to."""
        return Rounds(self._parts, self._see) if self._in_rounds else None

    def _see(self, prediction: EvalPrediction, is_last: bool) -> None:
        assert self._function is not None
        computed = self._function(prediction, compute_result=is_last)
        if is_last:
            self._computed = computed

    def update(self, said: Prediction) -> None:
        """Take in a batch of this rank."""
        if self._states is not None:
            self._states.update(said.predictions, said.labels)

    def compute(self, result: EvaluationResult, communicator: Communicator) -> dict[str, Any]:
        """Collective. The metrics of all that was evaluated, which `result` holds as far as it was to be kept."""
        if self._states is not None:
            return self._states.compute(communicator)
        if self._function is not None and not self._in_rounds:
            with failing_together(communicator, "computing metrics"):
                prediction = EvalPrediction(result.predictions, result.label_ids, result.inputs, result.losses)
                return dict(self._function(prediction, **({"compute_result": True} if self._by_batch else {})))
        return self._computed
