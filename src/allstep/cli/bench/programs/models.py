"""The models on which training steps are measured, from large matrices to many small tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

__all__ = ["MODELS", "Batch", "Workload", "batches", "loss_of", "optimizer_of"]

Batch = tuple[torch.Tensor, torch.Tensor | None]
"""Input and target; no target where the loss is the mean square of the output."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with the batches that it is given."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    """One micro-batch of one rank."""


class GPT(nn.Module):
    """A decoder on bytes: 6 blocks of width 384, 6 heads, 128 tokens, output tied to the input; 10.8 M parameters."""

    def __init__(self, width: int = 384, blocks: int = 6, heads: int = 6, context: int = 128, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads) for _ in range(blocks)))
        self.last_norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids (batch, tokens) to logits (batch, tokens, vocabulary)."""
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.blocks(self.tokens(ids) + self.positions(places))
        return functional.linear(self.last_norm(hidden), self.tokens.weight)


class DecoderBlock(nn.Module):
    """Causal attention and a perceptron, each behind a norm and beside a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.into_heads = nn.Linear(width, 3 * width)
        self.out_of_heads = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same."""
        # (batch, tokens, width) -> three of (batch, heads, tokens, width per head)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.into_heads(self.before_attention(hidden)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.out_of_heads(mixed)
        added: torch.Tensor = self.perceptron(hidden)
        return hidden + added


class ResNet(nn.Module):
    """Three stages of three residual blocks, 16 to 64 channels, for pictures of 32 x 32; 0.27 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        channels = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        blocks = [ResidualBlock(before, after) for before, after in pairwise(channels)]
        self.stem = _convolution(3, 16)
        self.blocks = nn.Sequential(*blocks)
        self.classes = nn.Linear(64, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """(batch, 3, 32, 32) to logits (batch, 10)."""
        features: torch.Tensor = self.blocks(functional.relu(self.stem(pictures)))
        logits: torch.Tensor = self.classes(features.mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions beside a skip; where channels grow, the picture is halved."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.first = _convolution(before, after, stride=stride)
        self.second = _convolution(after, after)
        self.skip = nn.Identity() if before == after else _convolution(before, after, size=1, stride=stride)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) to the same, or to more channels of half the size."""
        return functional.relu(self.skip(pictures) + self.second(functional.relu(self.first(pictures))))


def _convolution(before: int, after: int, *, size: int = 3, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after))


def _mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())))


def _small() -> nn.Module:
    """Orthogonal weights: through 200 layers, the usual ones let the signal sink to denormals, which are slow."""
    layers = [nn.Linear(64, 64) for _ in range(200)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def _numbers(*shape: int) -> Callable[[torch.Generator], Batch]:
    return lambda source: (torch.randn(*shape, generator=source), None)


def _pictures(source: torch.Generator) -> Batch:
    return torch.randn(16, 3, 32, 32, generator=source), torch.randint(10, (16,), generator=source)


def _text(source: torch.Generator) -> Batch:
    ids = torch.randint(256, (4, 129), generator=source)
    return ids[:, :-1], ids[:, 1:].flatten()


MODELS = {
    "mlp32": Workload(build=_mlp, batch=_numbers(32, 1024)),
    "mlp128": Workload(build=_mlp, batch=_numbers(128, 1024)),
    "small": Workload(build=_small, batch=_numbers(8, 64)),
    "gpt": Workload(build=GPT, batch=_text),
    "resnet": Workload(build=ResNet, batch=_pictures),
    "encoder": Workload(build=_encoder, batch=_numbers(4, 64, 384)),
}


def batches(name: str, rank: int, count: int = 4) -> Sequence[Batch]:
    """The micro-batches that `rank` goes through again and again."""
    source = torch.Generator().manual_seed(1 + rank)
    return [MODELS[name].batch(source) for _ in range(count)]


def loss_of(output: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """Mean square without a target; cross entropy with one."""
    if target is None:
        return output.square().mean()
    return functional.cross_entropy(output.reshape(-1, output.shape[-1]), target)


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """`sgd` or `adamw`, as torch makes them."""
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=1e-3)
    return torch.optim.AdamW(module.parameters(), lr=1e-5)
