"""What a model says about a batch that it does not train on: loss, logits and labels."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allstep.trainer.evaluation.evaluate import EvaluationResult, Prediction
from allstep.trainer.models.losses import call_model

__all__ = ["Predictor", "summary"]


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Turns inputs into a `Prediction`."""

    model: nn.Module
    compute_loss: Callable[..., Any]
    """`compute_loss(model, inputs, weight, return_outputs=True)` gives the mean loss and what the model returned."""
    label_names: Sequence[str]
    only_loss: bool
    """Keep nothing but the loss."""
    ignored: Collection[str] = ()
    """Keys of the model's outputs that are left out."""

    def __call__(self, inputs: Any, weight: float) -> Prediction:
        """What the model says about `inputs`, which are on its device, and whose mean loss is taken over `weight`.

        Without labels the loss is what the model calls so in a dict or object; models that compare inputs with themselves do.
        """
        labels = self._labels(inputs)
        if labels is None and isinstance(inputs, Mapping):
            outputs = call_model(self.model, inputs)
            loss = _named_loss(outputs)
        else:
            loss, outputs = self.compute_loss(self.model, inputs, weight, return_outputs=True)
        if self.only_loss:
            return Prediction(loss, None, None)
        return Prediction(loss, _logits(outputs, loss is not None, self.ignored), labels)

    def _labels(self, inputs: Any) -> Any:
        if not isinstance(inputs, Mapping):
            return None
        found = tuple(inputs[name] for name in self.label_names if name in inputs)
        return found[0] if len(found) == 1 else found or None


def summary(
    result: EvaluationResult, computed: Mapping[str, float], prefix: str, seconds: float, batches: int
) -> dict[str, float]:
    """The metrics of an evaluation under their prefixed names: what was computed, the loss, and how fast it went."""
    metrics = dict(computed)
    if result.loss is not None:
        metrics[f"{prefix}_loss"] = result.loss
    metrics[f"{prefix}_runtime"] = round(seconds, 4)
    metrics[f"{prefix}_samples_per_second"] = round(result.samples / seconds, 3)
    metrics[f"{prefix}_steps_per_second"] = round(batches / seconds, 3)
    return {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metrics.items()}


def _named_loss(outputs: Any) -> torch.Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _logits(outputs: Any, has_loss: bool, ignored: Collection[str]) -> Any:
    """What a model returned, without the loss: one thing, or a tuple of what there is."""
    if isinstance(outputs, Mapping):
        kept = [value for key, value in outputs.items() if key != "loss" and key not in ignored]
    elif isinstance(outputs, (tuple, list)):
        kept = list(outputs[1:] if has_loss else outputs)
    else:
        return outputs if isinstance(outputs, torch.Tensor) and outputs.dim() else None
    return kept[0] if len(kept) == 1 else tuple(kept) if kept else None
