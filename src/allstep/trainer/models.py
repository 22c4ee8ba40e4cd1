"""A user's model made ready: on its device, with activations recomputed in backward where that was asked for."""

import torch
from torch import nn

from allstep.arguments import TrainingArguments
from allstep.ddp.module import DistributedDataParallel
from allstep.errors import ArgumentsError

__all__ = ["bare", "prepare_model", "wrap"]


def bare(model: nn.Module) -> nn.Module:
    """The model inside data-parallel wrappers."""
    while isinstance(model, (DistributedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    return model


def prepare_model(model: nn.Module, args: TrainingArguments, device: torch.device) -> nn.Module:
    """Move `model` to `device` and switch on activation checkpointing.

    Raises:
        ArgumentsError: activation checkpointing was asked of a model that cannot.
    """
    model.to(device)
    if args.recompute_activations:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise ArgumentsError(
                f"activation_checkpointing=True, but {type(model).__name__} has no gradient_checkpointing_enable(): call "
                f"torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) in its forward, and leave the argument out."
            )
        # reentrant checkpointing runs a backward inside the backward, which fits neither unused nor shared parameters
        enable(gradient_checkpointing_kwargs={"use_reentrant": False, **args.recompute_kwargs})
    return model


def wrap(model: nn.Module, args: TrainingArguments, *, in_order: bool) -> DistributedDataParallel:
    """Wrap `model` for training as the ddp_* arguments say; with `in_order` ranks are summed in a fixed order."""
    return DistributedDataParallel(
        model,
        forward_sync_buffers=args.ddp_broadcast_buffers is not False,
        bucket_cap_mb=args.ddp_bucket_cap_mb,
        find_unused_parameters=args.ddp_find_unused_parameters,
        static_graph=bool(args.ddp_static_graph),
        deterministic_reduction=in_order,
    )
