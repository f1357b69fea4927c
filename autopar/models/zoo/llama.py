"""Llama, and Mixtral as Llama with experts: rotary positions, RMS normalisation, grouped-query attention, SwiGLU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from autopar.models.zoo.parts import attend, rotary, rotate, token_loss, tokens


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """Sizes of a Llama; with `experts`, its feed-forward is a mixture of that many."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336
    vocab: int = 128256
    head_size: int = 0
    """Of one head; 0: its share of `hidden`."""

    qk_norm: bool = False
    """Whether each head's queries and keys are normalised (Qwen3, Gemma 3)."""

    joined: bool = False
    """Whether queries, keys and values come of one product, and so gate and up (Megatron-LM, nanotron)."""

    rope_theta: float = 500000.0
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 2
    capacity_factor: float = 1.25
    """Room that each expert has for the tokens of a sequence, over an even share; what exceeds it is dropped."""

    fused_attention: bool = True
    """Whether scores stay inside one kernel (flash attention)."""

    float32_loss: bool = True
    """Whether cross entropy is computed on the logits in float32, or as they are."""

    sequence: int = 8192
    """Sequence length where none is asked for; rotary positions set no limit."""

    default_batch = 8

    @property
    def default_seq(self) -> int:
        """Return the sequence length where none is asked for."""
        return self.sequence

    def model(self) -> nn.Module:
        """Return the model."""
        return Llama(self)

    def inputs(self, batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and labels [batch, seq]."""
        return tokens(self.vocab, batch, seq), tokens(self.vocab, batch, seq)


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a key and a value head."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.heads, self.kv_heads = settings.heads, settings.kv_heads
        self.size = settings.head_size or settings.hidden // settings.heads
        self.fused = settings.fused_attention
        self.joined = settings.joined
        if settings.joined:
            self.qkv = nn.Linear(settings.hidden, (settings.heads + 2 * settings.kv_heads) * self.size, bias=False)
        else:
            self.q = nn.Linear(settings.hidden, settings.heads * self.size, bias=False)
            self.k = nn.Linear(settings.hidden, settings.kv_heads * self.size, bias=False)
            self.v = nn.Linear(settings.hidden, settings.kv_heads * self.size, bias=False)
        self.out = nn.Linear(settings.heads * self.size, settings.hidden, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.size, eps=1e-6) if settings.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        b, s, _ = x.shape
        q, k, v = self._heads(x)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        y = attend(q, k, v, causal=True, fused=self.fused)
        out: torch.Tensor = self.out(y.reshape(b, s, self.heads * self.size))
        return out

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values [b, s, h, d]; joined, they are made group by group of shared keys."""
        b, s, _ = x.shape
        if not self.joined:
            q = self.q(x).view(b, s, self.heads, self.size)
            return q, *(each(x).view(b, s, self.kv_heads, self.size) for each in (self.k, self.v))
        shared = self.heads // self.kv_heads
        groups = self.qkv(x).view(b, s, self.kv_heads, (shared + 2) * self.size)
        q, k, v = torch.split(groups, [shared * self.size, self.size, self.size], dim=-1)
        return q.reshape(b, s, self.heads, self.size), k, v


class SwiGlu(nn.Module):
    """The gated feed-forward; joined, outputs of gate and up alternate, so that a split of them splits both."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.joined = settings.joined
        if settings.joined:
            self.gate_up = nn.Linear(settings.hidden, 2 * settings.intermediate, bias=False)
        else:
            self.gate = nn.Linear(settings.hidden, settings.intermediate, bias=False)
            self.up = nn.Linear(settings.hidden, settings.intermediate, bias=False)
        self.down = nn.Linear(settings.intermediate, settings.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1) if self.joined else (self.gate(x), self.up(x))
        out: torch.Tensor = self.down(functional.silu(gate) * up)
        return out


class Experts(nn.Module):
    """A mixture of gated feed-forwards: each token goes to the few that its router likes best.

    Every sequence routes by itself into a buffer of fixed room for each expert, so that all shapes are static, the
    batch splits without communication, and the experts are one batched product. Shapes: n experts, c room.
    """

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        n, e, f = settings.experts, settings.hidden, settings.intermediate
        self.chosen = settings.experts_per_token
        self.factor = settings.capacity_factor
        self.router = nn.Linear(e, n, bias=False)
        self.gate = nn.Parameter(torch.empty(n, e, f))
        self.up = nn.Parameter(torch.empty(n, e, f))
        self.down = nn.Parameter(torch.empty(n, f, e))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weights as `nn.Linear` draws its own."""
        for weight in (self.gate, self.up, self.down):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        b, s, e = x.shape
        n, k = self.gate.shape[0], self.chosen
        room = -(-math.ceil(self.factor * k * s / n) // 8) * 8
        weight, expert = self.router(x).float().softmax(dim=-1).topk(k, dim=-1)
        weight = (weight / weight.sum(dim=-1, keepdim=True)).to(x.dtype)
        # How many earlier choices of the sequence want the same expert is the place in its buffer.
        wanted = expert.flatten(1)[:, :, None] == torch.arange(n, device=x.device)  # [b, s*k, n]
        place = (wanted.cumsum(dim=1) * wanted).sum(dim=-1) - 1  # [b, s*k]
        fits = place < room
        slot = (expert.flatten(1) * room + place.clamp(max=room - 1))[:, :, None].expand(-1, -1, e)
        spread = x[:, :, None].expand(b, s, k, e).reshape(b, s * k, e) * fits[:, :, None]
        buffer = x.new_zeros(b, n * room, e).scatter_add(1, slot, spread)
        grouped = buffer.view(b, n, room, e).transpose(0, 1).reshape(n, b * room, e)
        done = torch.bmm(functional.silu(torch.bmm(grouped, self.gate)) * torch.bmm(grouped, self.up), self.down)
        done = done.view(n, b, room, e).transpose(0, 1).reshape(b, n * room, e).gather(1, slot)
        done = done.view(b, s, k, e) * (weight * fits.view(b, s, k))[..., None]
        out: torch.Tensor = done.sum(dim=2)
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each with its normalisation before it and a residual around."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.hidden, eps=1e-5)
        self.attention = Attention(settings)
        self.mlp_norm = nn.RMSNorm(settings.hidden, eps=1e-5)
        self.mlp = Experts(settings) if settings.experts else SwiGlu(settings)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """A decoder-only language model."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.size = settings.head_size or settings.hidden // settings.heads
        self.theta = settings.rope_theta
        self.float32_loss = settings.float32_loss
        self.embed = nn.Embedding(settings.vocab, settings.hidden)
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.hidden, eps=1e-5)
        self.head = nn.Linear(settings.hidden, settings.vocab, bias=False)
        if settings.tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting `labels` [b, s] (the next tokens) from `input_ids` [b, s]."""
        x = self.embed(input_ids)
        cos, sin = rotary(x.shape[1], self.size, self.theta, x.device)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return token_loss(self.head(self.norm(x)), labels, float32=self.float32_loss)
