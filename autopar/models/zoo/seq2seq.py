"""Encoder and decoder whose layers normalise first: BART, Whisper's text side, T5 and mT5 as training codes have them.

        inputs ─ embedding, positions ─ encoder layers ─ norm ─┐
        targets ─ embedding, positions ─ decoder layers (look at themselves, then there) ─ norm ─ head ─ loss

Positions are learned, one vector each: T5's bias of scores by distance is no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from autopar.models.zoo.parts import attend, drop, token_loss, tokens


@dataclass(frozen=True, slots=True)
class Seq2SeqSettings:
    """Sizes of an encoder and a decoder of the same width."""

    layers: int = 6
    """Of the encoder."""

    decoder_layers: int = 6
    hidden: int = 512
    heads: int = 8
    head_size: int = 0
    """Of one head; 0: its share of `hidden`."""

    intermediate: int = 2048
    gated: bool = False
    vocab: int = 32128
    positions: int = 512
    """Of the encoder."""

    decoder_positions: int = 512
    fused_attention: bool = True
    dropout: float = 0.0
    float32_loss: bool = True

    default_batch = 32
    default_seq = 512

    def model(self) -> nn.Module:
        """Return the model."""
        return Seq2Seq(self)

    def inputs(self, batch: int, seq: int) -> tuple[torch.Tensor, ...]:
        """Return encoder tokens [batch, seq], and decoder tokens and labels of its own positions."""
        targets = self.decoder_positions
        return tuple(tokens(self.vocab, batch, each) for each in (seq, targets, targets))


class Attention(nn.Module):
    """Attention of one sequence to itself, or to another."""

    def __init__(self, settings: Seq2SeqSettings, *, causal: bool = False, across: bool = False) -> None:
        super().__init__()
        self.settings, self.causal, self.across = settings, causal, across
        self.size = settings.head_size or settings.hidden // settings.heads
        inner = settings.heads * self.size
        if across:
            self.q = nn.Linear(settings.hidden, inner)
            self.kv = nn.Linear(settings.hidden, 2 * inner)
        else:
            self.qkv = nn.Linear(settings.hidden, 3 * inner)
        self.out = nn.Linear(inner, settings.hidden)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """Return [b, s, e] for x [b, s, e], which looks at `other` [b, t, e] or at itself."""
        b, s, _ = x.shape
        heads = self.settings.heads
        if other is None:
            q, k, v = self.qkv(x).view(b, s, heads, 3 * self.size).chunk(3, dim=-1)
        else:
            q = self.q(x).view(b, s, heads, self.size)
            k, v = self.kv(other).view(b, other.shape[1], heads, 2 * self.size).chunk(2, dim=-1)
        dropout = self.settings.dropout if self.training else 0.0
        y = attend(q, k, v, causal=self.causal, fused=self.settings.fused_attention, dropout=dropout)
        out: torch.Tensor = self.out(y.reshape(b, s, heads * self.size))
        return out


class Layer(nn.Module):
    """Attention, in a decoder also to the encoder, and feed-forward, each normalised before, with a residual around."""

    def __init__(self, settings: Seq2SeqSettings, *, decoder: bool) -> None:
        super().__init__()
        self.dropout, self.gated = settings.dropout, settings.gated
        hidden, width = settings.hidden, settings.intermediate
        self.attention_norm = nn.LayerNorm(settings.hidden)
        self.attention = Attention(settings, causal=decoder)
        self.cross_norm = nn.LayerNorm(settings.hidden) if decoder else None
        self.cross = Attention(settings, across=True) if decoder else None
        self.mlp_norm = nn.LayerNorm(settings.hidden)
        self.up = nn.Linear(hidden, width * (2 if settings.gated else 1))
        self.down = nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        x = x + drop(self.attention(self.attention_norm(x)), self.dropout, training=self.training)
        if self.cross is not None and self.cross_norm is not None:
            x = x + drop(self.cross(self.cross_norm(x), encoded), self.dropout, training=self.training)
        y = self.up(self.mlp_norm(x))
        if self.gated:
            gate, wide = y.unflatten(-1, (-1, 2)).unbind(-1)
            y = functional.gelu(gate, approximate="tanh") * wide
        else:
            y = functional.gelu(y, approximate="tanh")
        return x + drop(self.down(y), self.dropout, training=self.training)


class Seq2Seq(nn.Module):
    """A sequence-to-sequence language model; embeddings of both sides and the head are one."""

    def __init__(self, settings: Seq2SeqSettings) -> None:
        super().__init__()
        self.dropout, self.float32_loss = settings.dropout, settings.float32_loss
        self.embed = nn.Embedding(settings.vocab, settings.hidden)
        self.positions = nn.Embedding(settings.positions, settings.hidden)
        self.decoder_positions = nn.Embedding(settings.decoder_positions, settings.hidden)
        self.encoder = nn.ModuleList(Layer(settings, decoder=False) for _ in range(settings.layers))
        self.encoder_norm = nn.LayerNorm(settings.hidden)
        self.decoder = nn.ModuleList(Layer(settings, decoder=True) for _ in range(settings.decoder_layers))
        self.decoder_norm = nn.LayerNorm(settings.hidden)
        self.head = nn.Linear(settings.hidden, settings.vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, decoder_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting `labels` [b, t] from `input_ids` [b, s] and the tokens before them."""
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        y = self.embed(decoder_ids) + self.decoder_positions(torch.arange(labels.shape[1], device=labels.device))
        x, y = (drop(each, self.dropout, training=self.training) for each in (x, y))
        for layer in self.encoder:
            x = layer(x)
        encoded = self.encoder_norm(x)
        for layer in self.decoder:
            y = layer(y, encoded)
        return token_loss(self.head(self.decoder_norm(y)), labels, float32=self.float32_loss)
