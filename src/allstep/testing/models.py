"""Small models and data sets for tests of training: quick, and awkward where that finds mistakes."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

__all__ = ["Noisy", "Regression", "RegressionNet"]


class Regression(Dataset[dict[str, torch.Tensor]]):
    """`samples` rows (x: (4,), labels: ()), each a function of its index."""

    def __init__(self, samples: int, index_from: int = 0) -> None:
        self.samples, self.index_from = samples, index_from

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.index_from + index)
        x = torch.randn(4, generator=generator)
        return {"x": x, "labels": x.sum().sin()}


class Noisy(Regression):
    """The same, augmented with noise from all three generators that people use."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        noise = torch.rand(()) + float(np.random.rand()) + random.random()
        return {"x": sample["x"] + 0.1 * noise, "labels": sample["labels"]}


class RegressionNet(nn.Module):
    """A net for `Regression` with dropout; returns {"loss": (), "logits": (batch,)}."""

    def __init__(self, dropout: float = 0.0, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        """x: (batch, 4); labels: (batch,)."""
        logits = self.net(x).squeeze(-1)
        return {"logits": logits} if labels is None else {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}
