"""The half of a Trainer that evaluates and predicts."""

import math
import time
from typing import Any

from allstep.comm.watchdog import HERE
from allstep.data.loader import check_map_style
from allstep.data.streams import is_stream
from allstep.errors import DataError
from allstep.trainer import evaluation
from allstep.trainer.base import TrainerBase
from allstep.trainer.evaluation import EvaluationResult, Prediction, PredictionOutput
from allstep.trainer.metrics import Metrics
from allstep.trainer.precision import autocast, evaluation_dtype
from allstep.trainer.prediction import Predictor, summary

__all__ = ["EvaluatingTrainer"]


class EvaluatingTrainer(TrainerBase):
    """Evaluates and predicts. See `Trainer` for the arguments."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Collective. Evaluate on `eval_dataset`, or on the Trainer's own; the metrics, the same on every rank.

        Raises:
            DataError: there is no dataset, or an empty one.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        only_loss = self.args.prediction_loss_only or self.compute_metrics is None
        with HERE.within("evaluate"):
            _, metrics = self._evaluated(dataset, ignore_keys, metric_key_prefix, only_loss)
        self.log(metrics)
        self.callback_handler.call("on_evaluate", metrics=metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Collective. What the model says about `test_dataset`, rows in its order, the same on every rank."""
        only_loss = self.args.prediction_loss_only
        with HERE.within("predict"):
            result, metrics = self._evaluated(test_dataset, ignore_keys, metric_key_prefix, only_loss, keeps_rows=not only_loss)
        self.callback_handler.call("on_predict", metrics=metrics)
        return PredictionOutput(result.predictions, result.label_ids, metrics)

    def _evaluated(
        self, dataset: Any, ignore_keys: list[str] | None, prefix: str, only_loss: bool, *, keeps_rows: bool = False
    ) -> tuple[EvaluationResult, dict[str, float]]:
        if dataset is not None and not is_stream(dataset):
            check_map_style(dataset)
        if dataset is None or (not is_stream(dataset) and not len(dataset)):
            raise DataError(f"There is nothing to evaluate: the dataset is {'missing' if dataset is None else 'empty'}.")
        began = time.perf_counter()
        args, model, communicator = self.args, self._ready_model(), self.communicator
        batch_size = args.per_device_eval_batch_size
        predictor = Predictor(
            model=model,
            compute_loss=self._counted_loss,
            label_names=self.label_names,
            only_loss=only_loss,
            ignored=ignore_keys or (),
            preprocess=self.preprocess_logits_for_metrics,
        )
        metrics = Metrics(
            None if only_loss else self.compute_metrics,
            self.device,
            by_batch=args.batch_eval_metrics,
            keeps_rows=keeps_rows,
            include=args.include_for_metrics,
        )

        def on_batch(said: Prediction) -> None:
            metrics.update(said)
            self.callback_handler.call("on_prediction_step")

        rounds = metrics.rounds()
        result = evaluation.evaluate(
            self._loader(dataset).evaluation(batch_size, communicator.rank, communicator.size, in_turns=rounds is not None),
            predictor,
            model,
            communicator,
            weigh=self._loss_facts.weight,
            device=self.device,
            seed=args.seed,
            keep=metrics.keep,
            forward_context=lambda: autocast(args, self.device),
            on_batch=on_batch,
            rounds=rounds,
            dtype=evaluation_dtype(args),
        )
        if not result.samples:
            raise DataError(f"There is nothing to evaluate: the stream {type(dataset).__name__} is empty. Expected a sample.")
        computed = metrics.compute(result, communicator)
        seconds = max(time.perf_counter() - began, 1e-9)
        return result, summary(result, computed, prefix, seconds, math.ceil(result.samples / batch_size))
