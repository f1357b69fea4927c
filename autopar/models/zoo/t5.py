"""T5: encoder and decoder with relative positions that all layers of a stack share, output embedding tied."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from autopar.models.zoo.parts import token_loss, tokens


@dataclass(frozen=True, slots=True)
class T5Settings:
    """Sizes of a T5; `layers` are those of each stack."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    head_size: int = 64
    intermediate: int = 3072
    vocab: int = 32128
    buckets: int = 32
    distance: int = 128

    default_batch = 32
    default_seq = 512

    def model(self) -> nn.Module:
        """Return the model."""
        return T5(self)

    def inputs(self, batch: int, seq: int) -> tuple[torch.Tensor, ...]:
        """Return encoder tokens, decoder tokens and labels [batch, seq]."""
        return tuple(tokens(self.vocab, batch, seq) for _ in range(3))


class Positions(nn.Module):
    """A learned bias of attention by the distance between two positions, in buckets that widen with distance."""

    def __init__(self, settings: T5Settings, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.distance = settings.distance
        self.bias = nn.Embedding(settings.buckets, settings.heads)

    def forward(self, length: int) -> torch.Tensor:
        """Return the bias [1, h, s, s]; -inf where a causal stack must not look."""
        position = torch.arange(length, device=self.bias.weight.device)
        ahead = position[None, :] - position[:, None]
        bias: torch.Tensor = self.bias(self._bucket(ahead)).permute(2, 0, 1)[None]
        return bias.masked_fill(ahead > 0, float("-inf")) if self.causal else bias

    def _bucket(self, ahead: torch.Tensor) -> torch.Tensor:
        buckets = self.bias.num_embeddings if self.causal else self.bias.num_embeddings // 2
        exact = buckets // 2
        far = (-ahead).clamp(min=0) if self.causal else ahead.abs()
        scale = (buckets - exact) / math.log(self.distance / exact)
        wide = exact + ((far.clamp(min=1).float() / exact).log() * scale).to(torch.int64)
        bucket = torch.where(far < exact, far, wide.clamp(max=buckets - 1))
        return bucket if self.causal else bucket + (ahead > 0) * buckets


class Attention(nn.Module):
    """Attention of one sequence to itself or to another; T5 does not scale by the head size."""

    def __init__(self, settings: T5Settings) -> None:
        super().__init__()
        self.heads, self.size = settings.heads, settings.head_size
        inner = settings.heads * settings.head_size
        self.q = nn.Linear(settings.hidden, inner, bias=False)
        self.k = nn.Linear(settings.hidden, inner, bias=False)
        self.v = nn.Linear(settings.hidden, inner, bias=False)
        self.out = nn.Linear(inner, settings.hidden, bias=False)

    def forward(self, x: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [b, s, e] for x [b, s, e] that looks at `other` [b, t, e]."""
        b, s, _ = x.shape
        q, k, v = (
            part.view(b, part.shape[1], self.heads, self.size).transpose(1, 2)
            for part in (self.q(x), self.k(other), self.v(other))
        )
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        out: torch.Tensor = self.out(y.transpose(1, 2).reshape(b, s, self.heads * self.size))
        return out


class Layer(nn.Module):
    """Attention, in a decoder also to the encoder, and feed-forward; normalisation before, residual around each."""

    def __init__(self, settings: T5Settings, *, decoder: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.hidden, eps=1e-6)
        self.attention = Attention(settings)
        self.cross_norm = nn.RMSNorm(settings.hidden, eps=1e-6) if decoder else None
        self.cross = Attention(settings) if decoder else None
        self.mlp_norm = nn.RMSNorm(settings.hidden, eps=1e-6)
        self.up = nn.Linear(settings.hidden, settings.intermediate, bias=False)
        self.down = nn.Linear(settings.intermediate, settings.hidden, bias=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, encoded: torch.Tensor | None) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, bias)
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(self.cross_norm(x), encoded, None)
        out: torch.Tensor = x + self.down(functional.relu(self.up(self.mlp_norm(x))))
        return out


class Stack(nn.Module):
    """The layers of encoder or decoder."""

    def __init__(self, settings: T5Settings, *, decoder: bool) -> None:
        super().__init__()
        self.positions = Positions(settings, causal=decoder)
        self.layers = nn.ModuleList(Layer(settings, decoder=decoder) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.hidden, eps=1e-6)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        bias = self.positions(x.shape[1]).to(x.dtype)
        for layer in self.layers:
            x = layer(x, bias, encoded)
        out: torch.Tensor = self.norm(x)
        return out


class T5(nn.Module):
    """A sequence-to-sequence language model."""

    def __init__(self, settings: T5Settings) -> None:
        super().__init__()
        self.embed = nn.Embedding(settings.vocab, settings.hidden)
        self.encoder = Stack(settings, decoder=False)
        self.decoder = Stack(settings, decoder=True)
        self.head = nn.Linear(settings.hidden, settings.vocab, bias=False)
        self.head.weight = self.embed.weight
        self.scale = settings.hidden**-0.5

    def forward(self, input_ids: torch.Tensor, decoder_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting `labels` [b, t] from `input_ids` [b, s] and the tokens before them."""
        encoded = self.encoder(self.embed(input_ids))
        return token_loss(self.head(self.decoder(self.embed(decoder_ids), encoded) * self.scale), labels)
