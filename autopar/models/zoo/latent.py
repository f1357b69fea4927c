"""Latent attention of DeepSeek-V2: keys and values of all heads come of one narrow vector a position.

    x [b, s, e] ─ kv_down ─┬─ latent [b, s, c] ─ norm ─ kv_up ─┬─ keys without positions [b, s, h, n]
                           │                                   └─ values [b, s, h, v]
                           └─ one rotated key for all heads [b, s, 1, r]
    x ─ (q_down ─ norm ─) q_up ─ queries [b, s, h, n + r], of which the last r are rotated

DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1. Without a `q_rank` queries come of x itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from autopar.models.zoo.parts import attend, rotate


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of latent attention: the narrow vectors, and the parts of one head."""

    hidden: int
    heads: int
    q_rank: int
    """0: queries come of the input itself."""

    kv_rank: int
    plain: int
    """Of a head's queries and keys, what has no position."""

    rotated: int
    values: int
    fused: bool


class LatentAttention(nn.Module):
    """Causal attention whose keys and values come of a narrow vector."""

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, heads = sizes.hidden, sizes.heads
        if sizes.q_rank:
            self.q_down = nn.Linear(hidden, sizes.q_rank, bias=False)
            self.q_norm = nn.RMSNorm(sizes.q_rank, eps=1e-6)
        self.q_up = nn.Linear(sizes.q_rank or hidden, heads * (sizes.plain + sizes.rotated), bias=False)
        self.kv_down = nn.Linear(hidden, sizes.kv_rank + sizes.rotated, bias=False)
        self.kv_norm = nn.RMSNorm(sizes.kv_rank, eps=1e-6)
        self.kv_up = nn.Linear(sizes.kv_rank, heads * (sizes.plain + sizes.values), bias=False)
        self.out = nn.Linear(heads * sizes.values, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        sizes = self.sizes
        b, s, _ = x.shape
        narrow = self.q_norm(self.q_down(x)) if sizes.q_rank else x
        q = self.q_up(narrow).view(b, s, sizes.heads, sizes.plain + sizes.rotated)
        q_plain, q_turned = q.split([sizes.plain, sizes.rotated], dim=-1)
        latent, key = self.kv_down(x).split([sizes.kv_rank, sizes.rotated], dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(b, s, sizes.heads, sizes.plain + sizes.values)
        k_plain, v = kv.split([sizes.plain, sizes.values], dim=-1)
        k_turned = rotate(key[:, :, None], cos, sin).expand(b, s, sizes.heads, sizes.rotated)
        q = torch.cat((q_plain, rotate(q_turned, cos, sin)), dim=-1)
        k = torch.cat((k_plain, k_turned), dim=-1)
        y = self._attend(q, k, v).reshape(b, s, sizes.heads * sizes.values)
        out: torch.Tensor = self.out(y)
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return [b, s, h, v]; kernels that PyTorch has take values of the keys' size alone, so they are padded."""
        more = q.shape[-1] - v.shape[-1]
        if not self.sizes.fused or more <= 0:
            return attend(q, k, v, causal=True, fused=self.sizes.fused)
        return attend(q, k, functional.pad(v, (0, more)), causal=True, fused=True)[..., : v.shape[-1]]
