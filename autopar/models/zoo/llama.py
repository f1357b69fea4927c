"""Llama and its kin: rotary positions, RMS normalisation, grouped-query attention, SwiGLU.

With experts it is Mixtral, with latent attention, experts that all tokens share, and dense layers first, DeepSeek-V3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from autopar.models.zoo.latent import LatentAttention, LatentSizes
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

    weighs_inside: bool = False
    """Whether an expert's activation is multiplied by the token's weight, or what the expert makes of it.

    Inside, backward needs no expert's output: Megatron-Core since 0.13 (`weighted_bias_swiglu_impl`).
    """

    shared_intermediate: int = 0
    """Width of a feed-forward beside the experts that all tokens take, of all shared experts together; 0: none."""

    dense_layers: int = 0
    """Of `layers`, the first that have a feed-forward of `dense_intermediate` in place of experts."""

    dense_intermediate: int = 0
    kv_rank: int = 0
    """Of latent attention, the size of the vector that keys and values come of; 0: attention is grouped-query."""

    q_rank: int = 0
    """Of latent attention, the size of the vector that queries come of; 0: they come of the input."""

    plain_size: int = 128
    """Of latent attention, what of a head's queries and keys has no position."""

    rotated_size: int = 64
    """Of latent attention, what of a head's queries and keys is rotated by positions."""

    value_size: int = 128
    """Of latent attention, a head's values."""

    predictions: int = 0
    """Layers behind the last that predict further tokens, one each (multi-token prediction)."""

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

    @property
    def turned_size(self) -> int:
        """Return what of a head is rotated by positions."""
        return self.rotated_size if self.kv_rank else self.head_size or self.hidden // self.heads

    @property
    def latent(self) -> LatentSizes:
        """Return the sizes of latent attention."""
        ranks, parts = (self.q_rank, self.kv_rank), (self.plain_size, self.rotated_size, self.value_size)
        return LatentSizes(self.hidden, self.heads, *ranks, *parts, fused=self.fused_attention)

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

    def __init__(self, hidden: int, intermediate: int, *, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        if joined:
            self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        else:
            self.gate = nn.Linear(hidden, intermediate, bias=False)
            self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

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
        self.weighs_inside = settings.weighs_inside
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
        at = expert.flatten(1) * room + place.clamp(max=room - 1)
        slot = at[:, :, None].expand(-1, -1, e)
        spread = x[:, :, None].expand(b, s, k, e).reshape(b, s * k, e) * fits[:, :, None]
        buffer = x.new_zeros(b, n * room, e).scatter_add(1, slot, spread)
        grouped = buffer.view(b, n, room, e).transpose(0, 1).reshape(n, b * room, e)
        active = functional.silu(torch.bmm(grouped, self.gate)) * torch.bmm(grouped, self.up)
        if self.weighs_inside:
            weights = x.new_zeros(b, n * room).scatter_add(1, at, weight.flatten(1) * fits)
            active = active * weights.view(b, n, room).transpose(0, 1).reshape(n, b * room)[:, :, None]
        done = torch.bmm(active, self.down)
        done = done.view(n, b, room, e).transpose(0, 1).reshape(b, n * room, e).gather(1, slot)
        kept = fits.view(b, s, k) if self.weighs_inside else weight * fits.view(b, s, k)
        done = done.view(b, s, k, e) * kept[..., None]
        out: torch.Tensor = done.sum(dim=2)
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each with its normalisation before it and a residual around."""

    def __init__(self, settings: LlamaSettings, *, dense: bool) -> None:
        super().__init__()
        hidden, joined = settings.hidden, settings.joined
        width = settings.dense_intermediate or settings.intermediate
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.attention = LatentAttention(settings.latent) if settings.kv_rank else Attention(settings)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = SwiGlu(hidden, width, joined=joined) if dense else Experts(settings)
        shared = 0 if dense else settings.shared_intermediate
        self.shared = SwiGlu(hidden, shared, joined=joined) if shared else None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for [b, s, e]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        normed = self.mlp_norm(x)
        out: torch.Tensor = x + self.mlp(normed)
        return out if self.shared is None else out + self.shared(normed)


class Prediction(nn.Module):
    """A layer that predicts one token further, from the state so far and the embedding of the next token.

    DeepSeek-AI, "DeepSeek-V3" (arXiv:2412.19437), section 2.2; embedding and head are the model's.
    """

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.state_norm, self.token_norm = (nn.RMSNorm(settings.hidden, eps=1e-5) for _ in range(2))
        self.joining = nn.Linear(2 * settings.hidden, settings.hidden, bias=False)
        self.layer = Layer(settings, dense=not settings.experts)

    def forward(self, x: torch.Tensor, following: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return [b, s, e] for the state [b, s, e] and the embeddings [b, s, e] of the tokens that follow."""
        both = torch.cat((self.state_norm(x), self.token_norm(following)), dim=-1)
        out: torch.Tensor = self.layer(self.joining(both), cos, sin)
        return out


class Llama(nn.Module):
    """A decoder-only language model."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.size = settings.turned_size
        self.theta = settings.rope_theta
        self.float32_loss = settings.float32_loss
        self.embed = nn.Embedding(settings.vocab, settings.hidden)
        dense = settings.dense_layers if settings.experts else settings.layers
        self.further = settings.predictions
        self.layers = nn.ModuleList(Layer(settings, dense=at < dense) for at in range(settings.layers))
        self.layers.extend(Prediction(settings) for _ in range(settings.predictions))
        self.norm = nn.RMSNorm(settings.hidden, eps=1e-5)
        self.head = nn.Linear(settings.hidden, settings.vocab, bias=False)
        if settings.tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting `labels` [b, s] (the next tokens) from `input_ids` [b, s].

        What further tokens are predicted by is trained with a tenth of the weight, as DeepSeek-V3's at last.
        """
        x = self.embed(input_ids)
        cos, sin = rotary(x.shape[1], self.size, self.theta, x.device)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        last = len(self.layers) - self.further
        for layer in self.layers[:last]:
            x = layer(x, cos, sin)
        loss = token_loss(self.head(self.norm(x)), labels, float32=self.float32_loss)
        for prediction in self.layers[last:]:
            x = prediction(x, self.embed(labels.clamp(min=0)), cos, sin)
            labels = functional.pad(labels[:, 1:], (0, 1), value=_NO_LABEL)
            further = token_loss(self.head(self.norm(x)), labels, float32=self.float32_loss)
            loss = loss + _FURTHER / self.further * further
        return loss


_FURTHER = 0.1
"""Weight of the loss of further tokens: DeepSeek-V3's in the last third of its training (section 4.2)."""

_NO_LABEL = -100
