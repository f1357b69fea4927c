"""Small models that between them use what the rewriter and the runtime must handle."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Mlp(nn.Module):
    """Two layers and a loss inside; returns logits and loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and loss."""
        logits = self.down(torch.relu(self.up(x)))
        return logits, functional.cross_entropy(logits, y)


class Plain(nn.Module):
    """Logits alone: the loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.body(x)


class Twin(nn.Module):
    """Three differentiable results that share a trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.left = nn.Linear(16, 4)
        self.right = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return hidden values and two heads' values."""
        h = torch.tanh(self.trunk(x))
        return {"h": h, "left": self.left(h), "right": self.right(h * 2)}


class Vision(nn.Module):
    """Convolution, BatchNorm whose buffers forward changes, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = functional.max_pool2d(functional.relu(self.norm(self.conv(x))), 2)
        return functional.cross_entropy(self.head(x.mean((2, 3))), y)


class Tied(nn.Module):
    """A language model with tied embedding and head, attention, and a parameter that is never used."""

    def __init__(self, dropout: float = 0.0, of_scores: float = 0.0) -> None:
        super().__init__()
        self.of_scores = of_scores
        self.embed = nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.full((16,), 0.5), requires_grad=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return logits, and the loss if there are labels."""
        h = self.embed(ids) * self.frozen
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
        dropped = self.of_scores if self.training else 0.0
        a = functional.scaled_dot_product_attention(q, k, v, None, dropped, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(self.drop(h + self.out(a)))
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Turned(nn.Module):
    """Pairs of features as complex numbers, turned by angles that are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.angles = nn.Parameter(torch.linspace(0, 1, 2))
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        pairs = torch.view_as_complex(self.up(x).unflatten(-1, (4, 2, 2)))
        turned = pairs * torch.polar(torch.ones_like(self.angles), self.angles)
        return self.down(torch.view_as_real(turned).flatten(-3)).square().mean()


def cases() -> dict[str, tuple[nn.Module, Any]]:
    """Return each model with an example batch, the same at every call."""
    torch.manual_seed(1)
    ids = torch.randint(0, 32, (4, 8))
    return {
        "mlp": (Mlp(), (torch.randn(8, 8), torch.randint(0, 4, (8,)))),
        "plain": (Plain(), (torch.randn(8, 8),)),
        "twin": (Twin(), (torch.randn(8, 8),)),
        "vision": (Vision(), {"x": torch.randn(4, 3, 8, 8), "y": torch.randint(0, 4, (4,))}),
        "turned": (Turned(), (torch.randn(8, 4, 8),)),
        "tied": (Tied(), {"ids": ids, "labels": torch.randint(0, 32, (4, 8))}),
    }


class Layers(nn.Module):
    """Four residual layers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()
