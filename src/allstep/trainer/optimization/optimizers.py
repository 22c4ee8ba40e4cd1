"""Model and arguments in, torch optimizer out."""

import importlib
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError
from allstep.trainer.optimization.optimizer_classes import find_optimizer_class

__all__ = ["make_optimizer", "optimizer_class_and_kwargs", "resting", "set_training", "split_by_decay"]

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "mtia", "xpu"})
"""Device types for which torch has a fused AdamW; it refuses others only in the first step (test_optimizers.py)."""
_NORM_CLASS = re.compile(r"Norm(\dd)?$")
"""Class names of normalisation layers, such as LayerNorm, BatchNorm2d, and RMSNorm of model libraries."""


def make_optimizer(
    model: nn.Module,
    args: TrainingArguments,
    class_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
    decayed_names: Collection[str] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that `args.optim` names, over the trainable parameters of `model`.

    It has two parameter groups: the first decays by `weight_decay`, the second (biases, normalisation layers and other
    vectors) does not. Inside a group, parameters stand in the order of `model.named_parameters()`, the same on every rank.

    Args:
        class_and_kwargs: a class and its keyword arguments, in place of `args.optim`. "params" or "model" among them takes the
            place of the groups. What is no optimizer class is called without arguments, and the result with the model.
        decayed_names: the parameters that decay, in place of `split_by_decay`'s.

    Raises:
        ArgumentsError: no optimizer of that name, or a model without a trainable parameter.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        frozen = sum(1 for _ in model.parameters())
        raise ArgumentsError(
            f"{type(model).__name__} has no trainable parameter: found {frozen}, all with requires_grad=False; expected at "
            f"least one. Call requires_grad_(True) on what is to be trained."
            if frozen
            else f"{type(model).__name__} has no parameter: expected at least one to train."
        )
    names = set(split_by_decay(model)[0] if decayed_names is None else decayed_names)
    groups: Any = [
        {"params": [each for name, each in trainable.items() if name in names], "weight_decay": args.weight_decay},
        {"params": [each for name, each in trainable.items() if name not in names], "weight_decay": 0.0},
    ]
    kind, given = optimizer_class_and_kwargs(args, model) if class_and_kwargs is None else class_and_kwargs
    settings = dict(given)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        made: torch.optim.Optimizer = kind()(model, **settings)
        return made
    for name in ("params", "model"):
        groups = settings.pop(name, groups)
    optimizer = kind(groups, **settings)
    if settings.get("optim_bits") == 8 and kind.__module__.startswith("bitsandbytes"):
        _keep_embeddings_in_full(model)
    return optimizer


def optimizer_class_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
    """The class that `args.optim` names, and what it is called with beside the parameters.

    Args:
        model: whose parameters they will be; None takes them to be on a device with fused kernels.

    Raises:
        ArgumentsError: no optimizer of that name, its package is not installed, or `optim_args` does not fit it.
    """
    parameters = [] if model is None else [each for each in model.parameters() if each.requires_grad]
    return find_optimizer_class(args, can_fuse=_can_fuse(parameters))


@contextmanager
def resting(optimizer: Any) -> Iterator[None]:
    """Around an evaluation or a save: optimizers that train other weights than they are for (schedule-free) show these."""
    set_training(optimizer, False)
    try:
        yield
    finally:
        set_training(optimizer, True)


def set_training(optimizer: Any, training: bool) -> None:
    """Put an optimizer that has `train()` and `eval()` in that mode; others have none."""
    switch = getattr(optimizer, "train" if training else "eval", None)
    if callable(switch):
        switch()


def _keep_embeddings_in_full(model: nn.Module) -> None:
    """8-bit states are too coarse for embeddings: Dettmers et al., "8-bit Optimizers", 2022, section 2.3."""
    manager = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def split_by_decay(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The trainable parameters by name: those that weight decay shrinks, and those that it leaves alone."""
    normalising = {
        id(parameter)
        for module in model.modules()
        if _NORM_CLASS.search(type(module).__name__)
        for parameter in module.parameters(recurse=False)
    }
    decayed: dict[str, nn.Parameter] = {}
    others: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_plain = parameter.ndim > 1 and "bias" not in name and id(parameter) not in normalising
            (decayed if is_plain else others)[name] = parameter
    return decayed, others


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    return all(each.device.type in _FUSED_DEVICES and each.is_floating_point() for each in parameters)
