"""Models whose values do not just go from one block to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class SkipNet(nn.Module):
    """A U-Net in shape: what each down layer makes is read by the up layer opposite it."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(16, 8) for _ in range(depth))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        skips = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skips.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], -1)))
        return functional.mse_loss(x, y)


class Attention(nn.Module):
    """Two heads over what `memory` holds."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.both, self.out = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return what each place of `x` finds in `memory`."""
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (self.query(x), *self.both(memory).chunk(2, -1)))
        return self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention over a memory, then one linear layer, both beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the next value of the residual path."""
        x = x + self.attention(self.norm(x), memory, mask)
        return x + torch.relu(self.mlp(x))


class Translator(nn.Module):
    """Encoder and decoder with one embedding, a table of positions as buffer, masks made of inputs."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.register_buffer("positions", torch.linspace(0, 1, 48).view(6, 8))
        self.encoder = nn.ModuleList(Layer() for _ in range(layers))
        self.decoder = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and logits."""
        seen = (source != 0)[:, None, None, :].expand(-1, -1, source.shape[1], -1)
        memory = self.embed(source) + self.positions
        for layer in self.encoder:
            memory = layer(memory, memory, seen)
        x = self.embed(target) + self.positions
        for layer in self.decoder:
            x = layer(x, memory, seen)
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), target.flatten()), "logits": logits}


class Counting(nn.Module):
    """Layers that read a count of steps, which forward raises."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x)) * (1 + 1 / self.steps)
        self.steps += 1
        return x.square().mean()


class Repeated(nn.Module):
    """A linear layer in the middle of the others that runs at both ends too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.shared = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = torch.tanh(self.shared(torch.tanh(layer(x))))
        return x.square().mean()


class Strided(nn.Module):
    """Layers that hand on values whose elements do not lie side by side in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = torch.tanh(self.layers[0](x)).transpose(0, 1)
        x = torch.tanh(self.layers[1](x))[:, ::2]
        x = torch.tanh(self.layers[2](x)).sum(0, keepdim=True).expand(3, -1, -1).transpose(0, 1)
        return self.layers[3](x).square().mean()


class Again(nn.Module):
    """Layers with one BatchNorm between them, whose statistics each of them changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = self.norm(layer(x))
        return x.square().mean()


def branching() -> dict[str, tuple[nn.Module, Any]]:
    """Return each model with an example batch, the same at every call."""
    torch.manual_seed(2)
    ids = torch.randint(0, 16, (4, 6))
    return {
        "skips": (SkipNet(), (torch.randn(4, 8), torch.randn(4, 8))),
        "translator": (Translator(), (ids, torch.randint(0, 16, (4, 6)))),
        "counting": (Counting(), (torch.randn(4, 8),)),
        "repeated": (Repeated(), (torch.randn(4, 8),)),
        "strided": (Strided(), (torch.randn(4, 6, 8),)),
    }
