"""The loss of a micro-batch, and what it is worth beside the others of a step.

A model's loss is a mean over something: over label tokens where labels mark some as ignored, else over samples. Averaging such
means over micro-batches and ranks is wrong as soon as they are means over unequal counts. So each micro-batch has a weight,
that count; gradients of weight x loss are summed, and divided by the sum of the weights once, after the reduction.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from allstep.data.collate import size_of

__all__ = ["accepted_columns", "call_model", "label_names_of", "loss_of", "weight_of"]

IGNORED = -100
"""The label that a loss leaves out: `ignore_index` of torch's losses."""
FEW = 256
"""Labels that are counted as numbers, not as a tensor."""


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """`model(**inputs)` for a mapping, `model(*inputs)` for a tuple or list, `model(inputs)` for anything else."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def loss_of(outputs: Any, model: nn.Module) -> torch.Tensor:
    """The loss in what a model returned: its item or attribute "loss", its first element, or itself if it is one number.

    Raises:
        ValueError: there is no loss in it.
    """
    loss: Any = None
    if isinstance(outputs, torch.Tensor):
        loss = outputs
    elif isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif hasattr(outputs, "loss"):
        loss = outputs.loss
    elif isinstance(outputs, (tuple, list)) and outputs:
        loss = outputs[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{type(outputs).__name__}"
        keys = f" with keys {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
        raise ValueError(
            f"{type(model).__name__} returned no loss: found {found}{keys}; expected a dict or object with 'loss', a tuple "
            f"that begins with it, or the loss itself, as one number. Does the batch hold labels? Or pass compute_loss_func, "
            f"or override Trainer.compute_loss."
        )
    return loss.reshape(())


def weight_of(inputs: Any, label_names: Sequence[str]) -> int:
    """What the mean loss of a micro-batch was taken over: labels that count, token by token, else samples."""
    if isinstance(inputs, Mapping):
        named = [inputs.get(name) for name in label_names]
        labels = [each for each in named if isinstance(each, torch.Tensor) and each.dim() and not each.is_floating_point()]
        if labels:  # those of tokens before those of samples
            return _counted(next((each for each in labels if each.dim() > 1), labels[0]))
    size = size_of(inputs)
    return 1 if size is None else size


def _counted(labels: torch.Tensor) -> int:
    """How many of `labels` are not to be left out."""
    if labels.numel() <= FEW and labels.device.type == "cpu":  # two kernels take longer than counting a short list
        return labels.numel() - labels.flatten().tolist().count(IGNORED)
    return int((labels != IGNORED).sum())


def label_names_of(model: nn.Module, named: Sequence[str] | None) -> list[str]:
    """Names of inputs that are labels: those given, else those of forward's parameters that speak of labels, else "labels"."""
    if named is not None:
        return list(named)
    return [name for name in inspect.signature(model.forward).parameters if "label" in name] or ["labels"]


def accepted_columns(model: nn.Module, label_names: Sequence[str]) -> frozenset[str] | None:
    """Names that the model's forward takes, and labels; None where it takes any (`**kwargs`)."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset({parameter.name for parameter in parameters} | {"label", "label_ids", "labels"} | set(label_names))
