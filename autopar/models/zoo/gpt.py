"""GPT-2, GPT-3 and kin: normalisation before each part, output embedding tied to the input's.

What later models of the family changed is a setting: rotary positions, no biases, squared ReLU, groups of query heads
that share a key and a value head, an output embedding of its own (Nemotron-4 has all of these).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from autopar.models.zoo.parts import FeedForward, SelfAttention, drop, rotary, token_loss, tokens


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
    kv_heads: int = 0
    """Key and value heads; 0: as many as query heads."""

    causal: bool = True
    """Whether a position sees those before it alone, or all (the layers of an encoder, such as BERT's)."""

    bias: bool = True
    squared_relu: bool = False
    fused_gelu: bool = True
    """Whether GELU is one operator, or those of its formula by tanh."""

    rotary_positions: bool = False
    fused_attention: bool = True
    """Whether scores stay inside one kernel (flash attention)."""

    float32_loss: bool = True
    """Whether cross entropy is computed on the logits in float32, or as they are."""

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
        self.attention = SelfAttention(
            settings.hidden,
            settings.heads,
            causal=settings.causal,
            kv_heads=settings.kv_heads,
            bias=settings.bias,
            fused=settings.fused_attention,
            dropout=settings.dropout,
        )
        self.mlp_norm = nn.LayerNorm(settings.hidden)
        self.mlp = FeedForward(
            settings.hidden,
            settings.intermediate or 4 * settings.hidden,
            bias=settings.bias,
            squared_relu=settings.squared_relu,
            fused_gelu=settings.fused_gelu,
        )

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        x = x + drop(self.attention(self.attention_norm(x), turn), self.dropout, training=self.training)
        return x + drop(self.mlp(self.mlp_norm(x)), self.dropout, training=self.training)


class Gpt(nn.Module):
    """A decoder-only language model."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.dropout = settings.dropout
        self.float32_loss = settings.float32_loss
        self.tokens = nn.Embedding(settings.vocab, settings.hidden)
        self.positions = None if settings.rotary_positions else nn.Embedding(settings.positions, settings.hidden)
        self.size = settings.hidden // settings.heads
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.hidden)
        self.head = nn.Linear(settings.hidden, settings.vocab, bias=False)
        if settings.tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting `labels` [b, s] (the next tokens) from `input_ids` [b, s]."""
        x, turn = self.tokens(input_ids), None
        if self.positions is None:
            cos, sin = rotary(x.shape[1], self.size, 10000.0, x.device)
            turn = (cos.to(x.dtype), sin.to(x.dtype))
        else:
            x = x + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = drop(x, self.dropout, training=self.training)
        for block in self.blocks:
            x = block(x, turn)
        return token_loss(self.head(self.norm(x)), labels, float32=self.float32_loss)
