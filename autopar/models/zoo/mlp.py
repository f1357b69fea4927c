"""A stack of linear layers with ReLU between them, mean squared error against a target of the same width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class MlpSettings:
    """Sizes of an MLP."""

    layers: int = 4
    hidden: int = 1024
    bias: bool = True

    default_batch = 1024
    default_seq = 0

    def model(self) -> nn.Module:
        """Return the model."""
        return Mlp(self)

    def inputs(self, batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features and target [batch, hidden]; the sequence length is not used."""
        return torch.empty(batch, self.hidden), torch.empty(batch, self.hidden)


class Mlp(nn.Module):
    """Linear layers of one width."""

    def __init__(self, settings: MlpSettings) -> None:
        super().__init__()
        wide = settings.hidden
        self.layers = nn.ModuleList(nn.Linear(wide, wide, bias=settings.bias) for _ in range(settings.layers))

    def forward(self, features: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error."""
        x = self.layers[0](features)
        for layer in self.layers[1:]:
            x = layer(functional.relu(x))
        return functional.mse_loss(x, target)
