"""The half of a Trainer that evaluates and predicts."""

import math
import time
from typing import Any

import torch
from torch import nn

from allstep.comm.watchdog import HERE
from allstep.errors import DataError
from allstep.trainer.evaluation import evaluate as evaluation
from allstep.trainer.evaluation.evaluate import EvalLoopOutput, Prediction, PredictionOutput
from allstep.trainer.evaluation.metrics import Metrics
from allstep.trainer.evaluation.prediction import Predictor, summary
from allstep.trainer.models.precision import autocast, evaluation_dtype
from allstep.trainer.surface.loading import LoadingTrainer

__all__ = ["EvaluatingTrainer"]

_CACHES = ("cache", "past_key_values")
"""What transformers' models call the keys and values that they keep to generate the next token, now and earlier."""


class EvaluatingTrainer(LoadingTrainer):
    """Evaluates and predicts. See `Trainer` for the arguments."""

    _keeps_rows = False  # predictions are wanted for themselves

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Collective. Evaluate on `eval_dataset`, or on the Trainer's own; the metrics, the same on every rank.

        Args:
            eval_dataset: the data, a dict of several by name, or the name of one of the Trainer's own.
            ignore_keys: keys of the model's outputs that are left out.
            metric_key_prefix: what the names of metrics begin with.

        Raises:
            DataError: there is no dataset, or an empty one.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                given = name if eval_dataset is None else part
                metrics |= self.evaluate(given, ignore_keys=ignore_keys, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return metrics
        self._memory.begin("eval")
        loader = self.get_eval_dataloader(eval_dataset)
        self.callback_handler.eval_dataloader = loader
        with HERE.within("evaluate"):
            output = self.evaluation_loop(
                loader,
                description="Evaluation",
                prediction_loss_only=True if self.compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        self.log(output.metrics)
        self.callback_handler.call("on_evaluate", metrics=output.metrics)
        self._memory.end("eval", output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Collective. What the model says about `test_dataset`, rows in its order, the same on every rank."""
        self._memory.begin("test")
        loader = self.get_test_dataloader(test_dataset)
        self._keeps_rows = True
        try:
            with HERE.within("predict"):
                output = self.evaluation_loop(
                    loader, description="Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
                )
        finally:
            self._keeps_rows = False
        self.callback_handler.call("on_predict", metrics=output.metrics)
        self._memory.end("test", output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Collective. Run the model on all that `dataloader` has, each sample once over all ranks; override to add to it.

        Args:
            dataloader: what a `get_*_dataloader` gave, or any DataLoader, of all ranks.
            description: what is being done, for a person.
            prediction_loss_only: compute nothing but the loss; None as the arguments say.
            ignore_keys: keys of the model's outputs that are left out.
            metric_key_prefix: what the names of metrics begin with.

        Raises:
            DataError: there is not one sample.
            RankFailedError: another rank could not evaluate its part.
        """
        began = time.perf_counter()
        args, communicator, source = self.args, self.communicator, self._source(dataloader)
        only_loss = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        model = self._ready_model()
        metrics = Metrics(
            None if only_loss else self.compute_metrics,
            self.device,
            by_batch=args.batch_eval_metrics,
            keeps_rows=not only_loss and (self._keeps_rows or self.compute_metrics is None),
            include=args.include_for_metrics,
        )

        def predict(inputs: Any) -> Prediction:
            loss, logits, labels = self.prediction_step(model, inputs, only_loss, ignore_keys=ignore_keys)
            if logits is not None and self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            return Prediction(loss, logits, labels)

        def on_batch(said: Prediction) -> None:
            metrics.update(said)
            self.callback_handler.call("on_prediction_step")

        rounds = metrics.rounds()
        result = evaluation.evaluate(
            evaluation.feeds_of(source, args.seed, communicator, in_turns=rounds is not None),
            predict,
            model,
            communicator,
            weigh=self._loss_facts.weight,
            device=self.device,
            seed=args.seed,
            keep=metrics.keep,
            forward_context=lambda: autocast(args, self.device),
            on_batch=on_batch,
            rounds=rounds,
            spare=evaluation.spare_of(source, args.seed, communicator) if self._has_own_parts else None,
            rows_by_inputs=source.gives_batches,
            concatenates=args.eval_do_concat_batches,
            main_input=getattr(model, "main_input_name", "input_ids"),
            dtype=evaluation_dtype(args),
        )
        if not result.samples:
            raise DataError(
                f"There is nothing to evaluate: the stream {type(source.dataset).__name__} is empty. Expected a sample."
            )
        computed = metrics.compute(result, communicator)
        seconds = max(time.perf_counter() - began, 1e-9)
        batches = math.ceil(result.samples / args.per_device_eval_batch_size)
        numbers = summary(result, computed, metric_key_prefix, seconds, batches)
        return EvalLoopOutput(result.predictions, result.label_ids, numbers, result.samples)

    def prediction_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The older name of `evaluation_loop`."""
        return self.evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """What the model says about a batch: (mean loss, logits, labels), None for what there is not; override for your own.

        Args:
            model: in eval mode; gradients are off.
            inputs: a batch, not yet on the device.
            prediction_loss_only: give nothing but the loss.
            ignore_keys: keys of the model's outputs that are left out.
        """
        predictor = Predictor(
            model=model,
            compute_loss=self._counted_loss,
            label_names=self.label_names,
            only_loss=prediction_loss_only,
            ignored=ignore_keys if ignore_keys is not None else self._keys_to_ignore,
        )
        weight = self._loss_facts.weight(inputs) if self._loss_takes_count else 1
        return predictor(self._prepare_inputs(inputs), weight)

    @property
    def _has_own_parts(self) -> bool:
        """Whether a part of what computes a micro-batch is the user's, so that all ranks call it as often (window.py)."""
        methods = (self.training_step, self.compute_loss, self.prediction_step, self._prepare_inputs)
        is_own = (not str(getattr(method, "__module__", None)).startswith("allstep.") for method in methods)
        return self.compute_loss_func is not None or any(is_own)

    @property
    def _keys_to_ignore(self) -> list[str]:
        """Outputs that the model's configuration says are for inference only; caches, where it says nothing."""
        config = getattr(self.model, "config", None)
        return [] if config is None else list(getattr(config, "keys_to_ignore_at_inference", _CACHES) or ())
