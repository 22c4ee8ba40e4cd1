"""Label smoothing: part of the loss is how surprised the model is by all classes, not by the right one alone.

(1 - epsilon) x -log p(label) + epsilon x mean over classes of -log p, averaged over labels that are not -100. Szegedy et al.,
"Rethinking the Inception Architecture for Computer Vision", 2016, section 7; the same as torch's `cross_entropy`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["smoothed_loss"]


def smoothed_loss(outputs: Any, labels: torch.Tensor, epsilon: float, shifted: bool) -> torch.Tensor:
    """The smoothed loss of what a model returned, 0-dim: a mean over the labels that count.

    Args:
        outputs: has logits of shape (..., classes), under "logits" or as its first element.
        labels: (...), whole numbers, -100 for those that are left out.
        epsilon: 0 to 1.
        shifted: whether the logits at each place speak of the label at the next one, as those of causal models do.

    Raises:
        ValueError: logits and labels do not fit.
    """
    logits = outputs["logits"] if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    logits = outputs[0] if logits is None else logits
    if labels.is_floating_point() or (labels.shape != logits.shape[:-1] and labels.shape != (*logits.shape[:-1], 1)):
        raise ValueError(
            f"label_smoothing_factor={epsilon} needs labels that are classes: found logits {tuple(logits.shape)} and labels "
            f"{tuple(labels.shape)} of {labels.dtype}; expected whole numbers of shape {tuple(logits.shape[:-1])}."
        )
    labels = labels.reshape(logits.shape[:-1])
    if shifted:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    return nn.functional.cross_entropy(logits.float(), labels.to(logits.device), label_smoothing=epsilon)
