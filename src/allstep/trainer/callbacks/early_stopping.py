"""Stop when evaluations no longer get better."""

import warnings
from collections.abc import Mapping
from typing import Any

from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError
from allstep.trainer.callbacks.handler import TrainerCallback
from allstep.trainer.state import ExportableState, TrainerControl, TrainerState

__all__ = ["EarlyStoppingCallback"]


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops training once `metric_for_best_model` has not got better for some evaluations in a row.

    How long that has been so goes into each checkpoint, and comes back where `restore_callback_states_from_checkpoint` is set.

    Args:
        early_stopping_patience: evaluations without a better value, at least 1.
        early_stopping_threshold: how much better than the best one a value has to be; in units of the metric.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0
        """Evaluations in a row without a better value."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look whether there will be something to decide by.

        Raises:
            ArgumentsError: there is no metric, or nothing is evaluated.
        """
        missing = []
        if args.metric_for_best_model is None:
            missing.append('metric_for_best_model, such as "loss"')
        if args.eval_strategy == "no":
            missing.append('eval_strategy="steps" or "epoch"')
        if missing:
            raise ArgumentsError(f"EarlyStoppingCallback stops when evaluations get no better: give {' and '.join(missing)}.")
        if not args.load_best_model_at_end:
            warnings.warn(
                "EarlyStoppingCallback stops some evaluations behind the best one, and the model keeps its last weights: "
                "set load_best_model_at_end=True to end with those of the best.",
                stacklevel=2,
            )

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Compare the metric with the best one before; an evaluation that does not have it says nothing."""
        name = str(args.metric_for_best_model)
        value = (metrics or {}).get(name if name.startswith("eval_") else f"eval_{name}")
        if value is None:
            return
        if self._is_better(value, state.best_metric, bool(args.greater_is_better)):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """Patience and threshold, and how long there was nothing better."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }

    def _is_better(self, value: float, best: float | None, greater: bool) -> bool:
        if best is None:
            return True
        return (value - best if greater else best - value) > (self.early_stopping_threshold or 0.0)
