"""Small models and data sets for tests of training: quick, and awkward where that finds mistakes."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

__all__ = ["Noisy", "Regression", "RegressionNet", "Seen", "Tagger", "Tokens", "pad"]

IGNORED = -100
"""The label that no loss counts."""


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


class Seen(Regression):
    """The same; keeps the indices that were read in this process."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.indices: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.indices.append(index)
        return super().__getitem__(index)


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


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """`samples` rows (tokens: (length,), labels: (length,)) of 1 to 6 tokens, with ignored labels among them.

    Row 2 has no other label than ignored ones, and so have those whose number is in `without`.
    """

    classes = 5

    def __init__(self, samples: int, without: tuple[int, ...] = ()) -> None:
        self.samples, self.without = samples, (2, *without)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = 1 + (5 * index + 2) % 6
        tokens = torch.randint(self.classes, (length,), generator=generator)
        ignored = torch.rand(length, generator=generator) < (2.0 if index in self.without else 0.4)
        return {"tokens": tokens, "labels": torch.where(ignored, IGNORED, tokens.flip(0))}


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of `Tokens` as (batch, length of the longest)."""
    fillers = {"tokens": 0, "labels": IGNORED}
    return {
        key: nn.utils.rnn.pad_sequence([sample[key] for sample in samples], batch_first=True, padding_value=fillers[key])
        for key in samples[0]
    }


class Tagger(nn.Module):
    """A net for `Tokens` with dropout; its loss is a mean over the labels that count."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.dropout = nn.Embedding(Tokens.classes, 8), nn.Dropout(dropout)
        self.head = nn.Linear(8, Tokens.classes)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """tokens, labels: (batch, length); logits: (batch, length, classes)."""
        logits = self.head(self.dropout(self.embed(tokens)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
