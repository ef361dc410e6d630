"""Digits drawn by strokes on every machine alike, and a small vision transformer that reads them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

__all__ = ["Digits", "VisionConfig", "VisionTransformer", "drawn", "loss_of"]

ATTENTIONS = ("manual", "sdpa")

#: Strokes of each digit as lines from point to point, in a unit square with y downwards.
_STROKES: tuple[tuple[tuple[float, float], ...], ...] = (
    ((0.3, 0.2), (0.7, 0.2), (0.75, 0.5), (0.7, 0.8), (0.3, 0.8), (0.25, 0.5), (0.3, 0.2)),
    ((0.35, 0.35), (0.55, 0.2), (0.55, 0.8)),
    ((0.28, 0.3), (0.5, 0.18), (0.72, 0.32), (0.28, 0.8), (0.74, 0.8)),
    ((0.28, 0.2), (0.7, 0.2), (0.48, 0.46), (0.72, 0.65), (0.5, 0.82), (0.28, 0.74)),
    ((0.62, 0.8), (0.62, 0.2), (0.25, 0.62), (0.76, 0.62)),
    ((0.7, 0.2), (0.32, 0.2), (0.3, 0.46), (0.62, 0.46), (0.7, 0.65), (0.55, 0.8), (0.28, 0.78)),
    ((0.66, 0.2), (0.38, 0.4), (0.28, 0.65), (0.48, 0.8), (0.7, 0.68), (0.5, 0.5), (0.3, 0.6)),
    ((0.26, 0.2), (0.74, 0.2), (0.42, 0.8)),
    ((0.5, 0.48), (0.3, 0.34), (0.5, 0.2), (0.7, 0.34), (0.28, 0.66), (0.5, 0.82), (0.72, 0.66), (0.5, 0.48)),
    ((0.7, 0.4), (0.5, 0.5), (0.3, 0.34), (0.5, 0.2), (0.7, 0.34), (0.62, 0.8)),
)


def drawn(label: int, seed: int, size: int = 32) -> numpy.ndarray:
    """One digit, (size, size) of float32 from 0 to 1: turned, scaled, moved, of another stroke width, with noise.

    The same for the same label and seed on every machine: distances from pixels to strokes, softened at the edge.
    """
    random = numpy.random.default_rng((label, seed))
    points = numpy.asarray(_STROKES[label]) - 0.5
    turn, scale = random.uniform(-0.25, 0.25), random.uniform(0.8, 1.15, 2)
    rotation = numpy.array([[numpy.cos(turn), -numpy.sin(turn)], [numpy.sin(turn), numpy.cos(turn)]])
    points = (points * scale) @ rotation + 0.5 + random.uniform(-0.08, 0.08, 2)
    axis = (numpy.arange(size) + 0.5) / size
    pixels = numpy.stack(numpy.meshgrid(axis, axis), axis=-1)[:, :, None]  # (size, size, 1, 2)
    starts, along = points[:-1], points[1:] - points[:-1]
    nearest = ((pixels - starts) * along).sum(-1) / (along**2).sum(-1)
    distance = numpy.linalg.norm(pixels - starts - nearest.clip(0, 1)[..., None] * along, axis=-1).min(-1)
    width = random.uniform(0.03, 0.06)
    ink = 1 / (1 + numpy.exp((distance - width) * 6 * size / 4))
    image: numpy.ndarray = (ink + random.normal(0, 0.08, ink.shape)).clip(0, 1).astype(numpy.float32)
    return image


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Images (1, size, size) and labels. ``read_ms``: what fetching one costs, as from a disk or a store far away."""

    def __init__(self, count: int, size: int = 32, read_ms: float = 0.0, seed: int = 0) -> None:
        self.count = count
        self.size = size
        self.read_ms = read_ms
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.read_ms:
            time.sleep(self.read_ms / 1000)
        label = index % 10
        return torch.from_numpy(_kept(label, self.seed * self.count + index, self.size))[None], label


@lru_cache(maxsize=8192)
def _kept(label: int, seed: int, size: int) -> numpy.ndarray:
    return drawn(label, seed, size)


@dataclass(frozen=True)
class VisionConfig:
    """The shape of the model. Raises ``ValueError`` where heads or patches do not divide."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    image: int = 32
    patch: int = 4
    classes: int = 10
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a hidden size of {self.hidden}")
        if self.image % self.patch:
            raise ValueError(f"patches of {self.patch} do not divide an image of {self.image}")


class Attention(nn.Module):
    """Self-attention among all patches, (batch, patches, hidden) to the same."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_size = config.hidden // config.heads
        self.implementation = "manual"
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def set_attention(self, implementation: str) -> None:
        """Choose ``manual`` or ``sdpa`` from the next call on."""
        if implementation not in ATTENTIONS:
            raise ValueError(f"attention {implementation!r} is none of {ATTENTIONS}")
        self.implementation = implementation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, patches, hidden)."""
        batch, patches, _ = x.shape
        split = self.qkv(x).view(batch, patches, 3, -1, self.head_size)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if self.implementation == "sdpa":
            mixed = functional.scaled_dot_product_attention(query, key, value)
        else:
            scores = query @ key.transpose(-2, -1) * self.head_size**-0.5
            mixed = scores.softmax(-1) @ value
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, patches, -1))
        return result


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to its input."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, patches, hidden)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        result: torch.Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return result


class VisionTransformer(nn.Module):
    """Images (batch, 1, image, image) to scores (batch, classes), after Dosovitskiy et al. 2021, with mean pooling."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(1, config.hidden, config.patch, config.patch)
        count = (config.image // config.patch) ** 2
        self.positions = nn.Parameter(torch.randn(count, config.hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Of (batch, 1, image, image), from 0 to 1."""
        x = self.patches(2.0 * images - 0.5).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x).mean(1))
        return scores


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy in nats. ``batch``: images (batch, 1, size, size) and labels (batch,)."""
    images, labels = batch
    return functional.cross_entropy(model(images).float(), labels)
