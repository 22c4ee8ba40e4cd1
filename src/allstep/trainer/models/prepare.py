"""A user's model made ready: on its device, compiled, with activations recomputed in backward, as the arguments ask."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from allstep.arguments import TrainingArguments
from allstep.ddp.module import DistributedDataParallel
from allstep.errors import ArgumentsError
from allstep.trainer.models.neftune import noisy_embeddings

__all__ = ["bare", "in_training", "prepare_model", "wrap"]


def bare(model: nn.Module) -> nn.Module:
    """The model inside data-parallel wrappers."""
    while isinstance(model, (DistributedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    return model


def prepare_model(model: nn.Module, args: TrainingArguments, device: torch.device) -> nn.Module:
    """Move `model` to `device`, switch on activation checkpointing, and have it compiled at its first forward.

    It is compiled in place, so that it stays the same object, and its parameters keep their names (test_compiled_models.py).

    Raises:
        ArgumentsError: activation checkpointing was asked of a model that cannot.
    """
    model.to(device)
    if args.recompute_activations:
        _recompute_activations(model, args.recompute_kwargs)
    if args.torch_compile:
        model.compile(backend=args.torch_compile_backend or "inductor", mode=args.torch_compile_mode)
    return model


def _recompute_activations(model: Any, settings: dict[str, Any]) -> None:
    # reentrant checkpointing runs a backward inside the backward, which fits neither unused nor shared parameters
    settings = {"use_reentrant": False, **settings}
    if hasattr(model, "activation_checkpointing_enable"):
        of_layers = {name: settings.pop(name) for name in ("every_n_layers", "offload") if name in settings}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings, **of_layers)
    elif hasattr(model, "gradient_checkpointing_enable"):  # its older name
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    else:
        raise ArgumentsError(
            f"activation_checkpointing=True, but {type(model).__name__} has neither activation_checkpointing_enable() nor "
            f"gradient_checkpointing_enable(): call torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) in its "
            f"forward, and leave the argument out."
        )


@contextmanager
def in_training(model: nn.Module, args: TrainingArguments) -> Iterator[None]:
    """Around a training: what the arguments change about `model` for that time, noise on embeddings and `config.use_cache`.

    Raises:
        ArgumentsError: noise was asked of a model that cannot.
    """
    config: Any = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    with noisy_embeddings(model, args.neftune_noise_alpha):
        if before is not None:
            config.use_cache = args.use_cache
        try:
            yield
        finally:
            if before is not None:
                config.use_cache = before


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
