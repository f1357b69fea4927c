"""What models of the user's own share: the table of their names, a loss around a body, a tower of layers on tokens.

Shapes: b samples, t steps of a sequence, d features, c channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Example = tuple[nn.Module, dict[str, Any]]
FACTORIES: dict[str, Callable[[int], Example]] = {}
"""The models by name."""

SEQ, WIDTH, HEADS, VOCABULARY, LAYERS = 16, 32, 4, 64, 4


def named(factory: Callable[[int], Example]) -> Callable[[int], Example]:
    """Enter a factory in the table, under its own name."""
    FACTORIES[factory.__name__] = factory
    return factory


class Around(nn.Module):
    """A body and what makes a loss of its result and a target."""

    def __init__(self, body: nn.Module, loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy) -> None:
        super().__init__()
        self.body = body
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        return self.loss(self.body(x), target)


def tokens(batch: int, seq: int = SEQ) -> Tensor:
    """Return random tokens [b, t]."""
    return torch.randint(VOCABULARY, (batch, seq))


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of logits [b, t, v] against tokens [b, t]."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Tower(nn.Module):
    """Embedded tokens through layers to logits; a layer maps [b, t, d] to the same."""

    def __init__(self, layer: Callable[[], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of tokens."""
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def language_model(layer: Callable[[], nn.Module], batch: int) -> Example:
    """Return a tower of a layer that predicts tokens."""
    return Around(Tower(layer), next_token), {"x": tokens(batch), "target": tokens(batch)}


def example(name: str, batch: int) -> Example:
    """Return a model in training mode and its keyword arguments, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs = FACTORIES[name](batch)
    return model.train(), inputs
