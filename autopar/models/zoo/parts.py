"""What transformer models share. Shapes: b batch, s sequence, h heads, d head size, e hidden, v vocabulary."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits [b, s, v] against labels [b, s], in float32; -100 is not counted."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def tokens(vocab: int, batch: int, seq: int) -> torch.Tensor:
    """Return token ids [batch, seq] for a vocabulary (as zeros: only shape and type matter)."""
    if vocab < 1:
        raise ValueError(f"a vocabulary of {vocab} has no tokens")
    return torch.zeros(batch, seq, dtype=torch.int64)


class SelfAttention(nn.Module):
    """Multi-head attention with one projection for query, key and value.

    The projection's outputs are ordered head by head, so that a contiguous split of them is a split of heads.
    """

    def __init__(self, hidden: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        b, s, e = x.shape
        q, k, v = self.qkv(x).view(b, s, self.heads, 3 * e // self.heads).transpose(1, 2).chunk(3, dim=-1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: torch.Tensor = self.out(y.transpose(1, 2).reshape(b, s, e))
        return out


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, intermediate)
        self.down = nn.Linear(intermediate, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        out: torch.Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return out
