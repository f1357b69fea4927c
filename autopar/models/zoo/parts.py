"""What transformer models share. Shapes: b batch, s sequence, h heads, d head size, e hidden, v vocabulary."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


def token_loss(logits: torch.Tensor, labels: torch.Tensor, *, float32: bool = True) -> torch.Tensor:
    """Return the mean cross entropy of logits [b, s, v] against labels [b, s]; -100 is not counted.

    `float32`: of the logits in that type, whatever theirs is; otherwise in theirs, under autocast as well.
    """
    scores = logits.flatten(0, 1)
    if float32:
        return functional.cross_entropy(scores.float(), labels.flatten())
    with torch.autocast(scores.device.type, enabled=False):
        return functional.cross_entropy(scores, labels.flatten())


def tokens(vocab: int, batch: int, seq: int) -> torch.Tensor:
    """Return token ids [batch, seq] for a vocabulary (as zeros: only shape and type matter)."""
    if vocab < 1:
        raise ValueError(f"a vocabulary of {vocab} has no tokens")
    return torch.zeros(batch, seq, dtype=torch.int64)


def rotary(seq: int, size: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [s, d] of the rotation of each pair of features at each position."""
    exponent = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    angle = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), theta**-exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return heads [b, s, h, d] rotated by their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return key or value heads [b, h, s, d], each once for every query head of its group."""
    b, h, s, d = x.shape
    if h == heads:
        return x
    return x[:, :, None].expand(b, h, heads // h, s, d).reshape(b, heads, s, d)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, fused: bool, dropout: float = 0.0
) -> torch.Tensor:
    """Return attention of heads [b, s, h, d]; not fused, the scores [b, h, s, s] are made in memory.

    Keys and values may have fewer heads, each for a group of query heads. `dropout` is that of the scores, in training,
    where they are in memory.
    """
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    if fused:
        grouped = k.shape[1] != q.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)
    k, v = spread(k, q.shape[1]), spread(v, q.shape[1])
    s = q.shape[2]
    scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -1e4)  # as Megatron-LM: fp16 holds no larger one safely
    return torch.matmul(drop(scores.softmax(dim=-1), dropout, training=True), v).transpose(1, 2)


def drop(x: torch.Tensor, probability: float, *, training: bool) -> torch.Tensor:
    """Return `x` after dropout; the tensor itself, and no copy of it, where nothing is dropped."""
    return functional.dropout(x, probability, training) if probability else x


class SelfAttention(nn.Module):
    """Multi-head attention with one projection for query, key and value.

    The projection's outputs are ordered group by group (the query heads that share a key and a value head, then these
    two), so that a contiguous split of them is a split of heads.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        causal: bool,
        kv_heads: int = 0,
        bias: bool = True,
        fused: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.size = hidden // heads
        self.causal = causal
        self.fused = fused
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, (heads + 2 * self.kv_heads) * self.size, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]; `turn`: cosines and sines where positions rotate queries and keys."""
        b, s, e = x.shape
        q, k, v = self._heads(self.qkv(x), b, s)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, causal=self.causal, fused=self.fused, dropout=dropout)
        out: torch.Tensor = self.out(y.reshape(b, s, e))
        return out

    def _heads(self, x: torch.Tensor, b: int, s: int) -> tuple[torch.Tensor, ...]:
        """Return queries [b, s, h, d], and keys and values of the groups."""
        if self.kv_heads == self.heads:
            return x.view(b, s, self.heads, 3 * self.size).chunk(3, dim=-1)
        shared = self.heads // self.kv_heads
        groups = x.view(b, s, self.kv_heads, (shared + 2) * self.size)
        q, k, v = torch.split(groups, [shared * self.size, self.size, self.size], dim=-1)
        return q.reshape(b, s, self.heads, self.size), k, v


def gelu_written_out(x: torch.Tensor) -> torch.Tensor:
    """Return GELU by tanh in the operators of its formula: `NewGELUActivation` of transformers, `NewGELU` of minGPT."""
    inner: torch.Tensor = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


class FeedForward(nn.Module):
    """Two linear layers with an activation between them: GELU, or the square of ReLU."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = True,
        squared_relu: bool = False,
        fused_gelu: bool = True,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, intermediate, bias=bias)
        self.down = nn.Linear(intermediate, hidden, bias=bias)
        self.squared_relu = squared_relu
        self.fused_gelu = fused_gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        y = self.up(x)
        if self.squared_relu:
            y = functional.relu(y).square()
        else:
            y = functional.gelu(y, approximate="tanh") if self.fused_gelu else gelu_written_out(y)
        out: torch.Tensor = self.down(y)
        return out
