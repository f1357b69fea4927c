"""BERT with its masked language model head: normalisation after each part, output embedding tied to the input's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from autopar.models.zoo.parts import FeedForward, SelfAttention, token_loss, tokens


@dataclass(frozen=True, slots=True)
class BertSettings:
    """Sizes of a BERT; `vocab` is its 30522 padded to a multiple of 64, as training codes do."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    intermediate: int = 3072
    vocab: int = 30528
    positions: int = 512

    default_batch = 32

    @property
    def default_seq(self) -> int:
        """Return the longest sequence."""
        return self.positions

    def model(self) -> nn.Module:
        """Return the model."""
        return Bert(self)

    def inputs(self, batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and labels [batch, seq]."""
        return tokens(self.vocab, batch, seq), tokens(self.vocab, batch, seq)


class Layer(nn.Module):
    """Attention and feed-forward, each with a residual around and its normalisation after."""

    def __init__(self, settings: BertSettings) -> None:
        super().__init__()
        self.attention = SelfAttention(settings.hidden, settings.heads, causal=False)
        self.attention_norm = nn.LayerNorm(settings.hidden)
        self.mlp = FeedForward(settings.hidden, settings.intermediate)
        self.mlp_norm = nn.LayerNorm(settings.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        x = self.attention_norm(x + self.attention(x))
        out: torch.Tensor = self.mlp_norm(x + self.mlp(x))
        return out


class Bert(nn.Module):
    """An encoder that predicts masked tokens."""

    def __init__(self, settings: BertSettings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(settings.vocab, settings.hidden)
        self.positions = nn.Embedding(settings.positions, settings.hidden)
        self.norm = nn.LayerNorm(settings.hidden)
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.layers))
        self.transform = nn.Linear(settings.hidden, settings.hidden)
        self.transform_norm = nn.LayerNorm(settings.hidden)
        self.head = nn.Linear(settings.hidden, settings.vocab)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the positions [b, s] whose label is not -100."""
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.tokens(input_ids) + self.positions(position))
        for layer in self.layers:
            x = layer(x)
        return token_loss(self.head(self.transform_norm(functional.gelu(self.transform(x)))), labels)
