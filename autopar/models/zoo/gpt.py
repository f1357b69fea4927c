"""GPT-2 and GPT-3: learned positions, normalisation before each part, output embedding tied to the input's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from autopar.models.zoo.parts import FeedForward, SelfAttention, token_loss, tokens


@dataclass(frozen=True, slots=True)
class GptSettings:
    """Sizes of a GPT; `vocab` is GPT-2's 50257 padded to a multiple of 128, as training codes do."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    intermediate: int = 0
    """0: four times `hidden`."""

    vocab: int = 50304
    positions: int = 1024
    dropout: float = 0.0
    tied: bool = True

    default_batch = 8

    @property
    def default_seq(self) -> int:
        """Return the longest sequence."""
        return self.positions

    def model(self) -> nn.Module:
        """Return the model."""
        return Gpt(self)

    def inputs(self, batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and labels [batch, seq]."""
        return tokens(self.vocab, batch, seq), tokens(self.vocab, batch, seq)


class Block(nn.Module):
    """Attention and feed-forward, each with its normalisation before it and a residual around."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.dropout = settings.dropout
        self.attention_norm = nn.LayerNorm(settings.hidden)
        self.attention = SelfAttention(settings.hidden, settings.heads, causal=True)
        self.mlp_norm = nn.LayerNorm(settings.hidden)
        self.mlp = FeedForward(settings.hidden, settings.intermediate or 4 * settings.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        x = x + functional.dropout(self.attention(self.attention_norm(x)), self.dropout, self.training)
        return x + functional.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class Gpt(nn.Module):
    """A decoder-only language model."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.dropout = settings.dropout
        self.tokens = nn.Embedding(settings.vocab, settings.hidden)
        self.positions = nn.Embedding(settings.positions, settings.hidden)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.hidden)
        self.head = nn.Linear(settings.hidden, settings.vocab, bias=False)
        if settings.tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting `labels` [b, s] (the next tokens) from `input_ids` [b, s]."""
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = functional.dropout(self.tokens(input_ids) + self.positions(position), self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.norm(x)), labels)
