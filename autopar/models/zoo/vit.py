"""Vision transformers for classification: square patches, a class token, normalisation before each part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from autopar.models.zoo.parts import FeedForward, SelfAttention


@dataclass(frozen=True, slots=True)
class VitSettings:
    """Sizes of a vision transformer."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    intermediate: int = 3072
    patch: int = 16
    image: int = 224
    classes: int = 1000

    default_batch = 64
    default_seq = 0

    def model(self) -> nn.Module:
        """Return the model."""
        return Vit(self)

    def inputs(self, batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images [batch, 3, image, image] and labels [batch]; the sequence length is not used."""
        return torch.empty(batch, 3, self.image, self.image), torch.zeros(batch, dtype=torch.int64)


class Layer(nn.Module):
    """Attention and feed-forward, each with its normalisation before it and a residual around."""

    def __init__(self, settings: VitSettings) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(settings.hidden)
        self.attention = SelfAttention(settings.hidden, settings.heads, causal=False)
        self.mlp_norm = nn.LayerNorm(settings.hidden)
        self.mlp = FeedForward(settings.hidden, settings.intermediate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Vit(nn.Module):
    """An image classifier."""

    def __init__(self, settings: VitSettings) -> None:
        super().__init__()
        count = (settings.image // settings.patch) ** 2
        self.patches = nn.Conv2d(3, settings.hidden, settings.patch, stride=settings.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, settings.hidden))
        self.positions = nn.Parameter(torch.zeros(1, count + 1, settings.hidden))
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.hidden)
        self.head = nn.Linear(settings.hidden, settings.classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of images [b, 3, y, x] against classes [b]."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)[:, 0]).float(), labels)
