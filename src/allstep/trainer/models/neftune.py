"""NEFTune: noise on the input embeddings in training, against overfitting of fine-tuned language models.

Each value gets uniform noise between -alpha / sqrt(length x width) and its opposite. Jain et al., "NEFTune: Noisy Embeddings
Improve Instruction Finetuning", 2023 (arXiv 2310.05914), section 2.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from allstep.errors import ArgumentsError

__all__ = ["noisy_embeddings"]


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """Inside, `model` sees noisy embeddings while it is in training mode. None: nothing is done.

    The noise comes from torch's generator, which is seeded for each micro-batch: it does not depend on the number of ranks.

    Raises:
        ArgumentsError: the model does not tell its input embeddings.
    """
    if alpha is None:
        yield
        return
    handle = _embeddings(model).register_forward_hook(lambda module, inputs, output: _with_noise(module, output, alpha))
    try:
        yield
    finally:
        handle.remove()


def _with_noise(module: nn.Module, output: torch.Tensor, alpha: float) -> torch.Tensor:
    """`output`: (batch, length, width)."""
    if not module.training:
        return output
    most = alpha / math.sqrt(output.shape[1] * output.shape[2])
    return output + torch.empty_like(output).uniform_(-most, most)


def _embeddings(model: Any) -> nn.Module:
    inner = model.base_model.model if hasattr(model, "peft_config") else model
    getter = getattr(inner, "get_input_embeddings", None)
    embeddings = None if getter is None else getter()
    if not isinstance(embeddings, nn.Module):
        raise ArgumentsError(
            f"neftune_noise_alpha is for models that tell their input embeddings: found {type(model).__name__} without "
            f"get_input_embeddings(). Define it, to return the embedding layer, or leave the argument out."
        )
    return embeddings
