"""Model and arguments in, torch optimizer out."""

import re

import torch
from torch import nn

from allstep._arguments.choices import OPTIMIZERS
from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError

__all__ = ["make_optimizer", "split_by_decay"]

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "mtia", "xpu"})
"""Device types for which torch has a fused AdamW; it refuses others only in the first step (test_optimizers.py)."""
_NORM_CLASS = re.compile(r"Norm(\dd)?$")
"""Class names of normalisation layers, such as LayerNorm, BatchNorm2d, and RMSNorm of model libraries."""


def make_optimizer(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """The optimizer that `args.optim` names, over the trainable parameters of `model`.

    It has two parameter groups: the first decays by `weight_decay`, the second (biases, normalisation layers and other
    vectors) does not. Inside a group, parameters stand in the order of `model.named_parameters()`, the same on every rank.

    Raises:
        ArgumentsError: no optimizer of that name, or a model without a trainable parameter.
    """
    decayed, others = split_by_decay(model)
    if not decayed and not others:
        frozen = sum(1 for _ in model.parameters())
        raise ArgumentsError(
            f"{type(model).__name__} has no trainable parameter: found {frozen}, all with requires_grad=False; expected at "
            f"least one. Call requires_grad_(True) on what is to be trained."
            if frozen
            else f"{type(model).__name__} has no parameter: expected at least one to train."
        )
    groups = [
        {"params": list(decayed.values()), "weight_decay": args.weight_decay},
        {"params": list(others.values()), "weight_decay": 0.0},
    ]
    lr = args.learning_rate
    if args.optim in ("adamw_torch", "adamw_torch_fused"):
        betas = (float(args.adam_beta1), float(args.adam_beta2))
        fused = args.optim == "adamw_torch_fused" and _can_fuse([*decayed.values(), *others.values()])
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=args.adam_epsilon, fused=fused or None)
    if args.optim == "sgd":
        return torch.optim.SGD(groups, lr=lr)
    if args.optim == "adagrad":
        return torch.optim.Adagrad(groups, lr=lr)
    if args.optim == "rmsprop":
        return torch.optim.RMSprop(groups, lr=lr)
    raise ArgumentsError(
        f"optim={args.optim!r}: expected one of {', '.join(OPTIMIZERS)}. For another, pass "
        f"Trainer(optimizers=(optimizer, None))."
    )


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
