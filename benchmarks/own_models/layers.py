"""Layers of the user's own in a tower on tokens: each does something that the usual ones do not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.own_models.parts import HEADS, SEQ, WIDTH, Example, language_model, named


class _Stateful(nn.Module):
    """Buffers that forward changes: a count, a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.layer(x - self.mean)


@named
def stateful(batch: int) -> Example:
    """Buffers that forward changes in place."""
    return language_model(_Stateful, batch)


class _Rotary(nn.Module):
    """Attention whose positions turn complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(SEQ), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def _turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns[:, None]).flatten(-2).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (self._turned(q), self._turned(k), v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@named
def complex_rotary(batch: int) -> Example:
    """Rotary positions as complex numbers, as Meta's Llama has them."""
    return language_model(_Rotary, batch)


class _Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(WIDTH, HEADS, 8) / 6) for _ in range(3))
        self.out = nn.Parameter(torch.randn(HEADS, 8, WIDTH) / 6)
        self.register_buffer("causal", torch.ones(SEQ, SEQ, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (torch.einsum("btd,dhe->bhte", x, w) for w in (self.q, self.k, self.v))
        scores = torch.einsum("bhqe,bhke->bhqk", q, k) / math.sqrt(8)
        weights = scores.masked_fill(~self.causal, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,bhke,hed->bqd", weights, v, self.out)


@named
def einsum(batch: int) -> Example:
    """Attention by einsum on parameters of three dimensions."""
    return language_model(_Einsum, batch)


@named
def convolutions(batch: int) -> Example:
    """Convolutions in one dimension: dilated, causal, gated (WaveNet)."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 3, dilation=2)
            self.mix = nn.Conv1d(WIDTH, WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = F.glu(self.conv(F.pad(x.transpose(1, 2), (4, 0))), dim=1)
            return self.mix(h).transpose(1, 2)

    return language_model(Gated, batch)


class _Chosen(nn.Module):
    """Keeps the best half of the steps: cumsum, topk, sort, gather, where, scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x).squeeze(-1)
        best, place = score.topk(SEQ // 2, dim=1)
        place, order = place.sort(dim=1)
        index = place[..., None].expand(-1, -1, WIDTH)
        chosen = self.layer(x.gather(1, index)) * torch.sigmoid(best.gather(1, order))[..., None]
        spread = torch.zeros_like(x).scatter(1, index, chosen)
        mean = x.cumsum(1) / torch.arange(1, SEQ + 1, device=x.device)[:, None]
        return torch.where((score > 0)[..., None], spread, mean)


@named
def chosen(batch: int) -> Example:
    """Mixture of depths: topk, sort, gather, scatter, cumsum, where."""
    return language_model(_Chosen, batch)


class _InPlace(nn.Module):
    """Operators in place, and parts of tensors written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x).mul_(2.0)
        made[:, 0] = self.first
        made[:, 1:, : WIDTH // 2] += x[:, :-1, WIDTH // 2 :]
        shifted = torch.empty_like(made)
        shifted[:, 1:] = made[:, :-1]
        shifted[:, :1] = 0
        return shifted.mul_(0.5).add_(made)


@named
def in_place(batch: int) -> Example:
    """Operators in place and slices written."""
    return language_model(_InPlace, batch)


class _LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.base(x) + 2.0 * self.up(self.down(x)))


@named
def lora(batch: int) -> Example:
    """Low-rank adapters on a frozen base."""
    model, inputs = language_model(_LowRank, batch)
    model.body.embed.requires_grad_(False)  # type: ignore[union-attr]
    model.body.head.requires_grad_(False)  # type: ignore[union-attr]
    return model, inputs


class _Straight(torch.autograd.Function):
    """Rounds; the gradient passes as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return (x / scale).round().clamp(-8, 7) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        inside = (x / scale).abs() < 8
        return gradients[0] * inside, (gradients[0] * ~inside).sum().reshape(scale.shape)


@named
def own_function(batch: int) -> Example:
    """A torch.autograd.Function of the user's: quantised weights, straight-through gradients."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
            self.scale = nn.Parameter(torch.full((1,), 0.05))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ _Straight.apply(self.weight, self.scale))  # type: ignore[no-untyped-call]

    return language_model(Quantised, batch)


@named
def checkpointed(batch: int) -> Example:
    """torch.utils.checkpoint around each layer."""
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layer, x, use_reentrant=False)

    return language_model(Again, batch)


@named
def autocast_inside(batch: int) -> Example:
    """A part of forward under autocast, another with autocast off."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                made = self.up(x)
                with torch.autocast("cpu", enabled=False):
                    made = self.down(F.relu(made.float()))
            return made

    return language_model(Mixed, batch)


@named
def weight_norms(batch: int) -> Example:
    """Weight norm and spectral norm as parametrizations, which keep buffers of their own."""

    def layer() -> nn.Module:
        first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 64))
        last = nn.utils.parametrizations.spectral_norm(nn.Linear(64, WIDTH))
        return nn.Sequential(first, nn.ReLU(), last)

    return language_model(layer, batch)


@named
def fourier(batch: int) -> Example:
    """Mixing of tokens by Fourier transforms (FNet)."""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(torch.fft.fft2(self.norm(x)).real)

    return language_model(Mix, batch)


@named
def mixture(batch: int) -> Example:
    """Experts chosen by a router, each on the rows that chose it, all computed (dense routing)."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 4)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
            weight = weight / weight.sum(-1, keepdim=True)
            made = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                share = (weight * (chosen == number)).sum(-1, keepdim=True)
                made = made + share * expert(x)
            return made

    return language_model(Experts, batch)


class _Scan(nn.Module):
    """A state space layer: a step after the other, in Python."""

    def __init__(self, state: int = 4) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.select = nn.Linear(WIDTH, 2 * state + 1)
        self.decay = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(WIDTH, 1))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.into(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        b, c, step = self.select(x).split([4, 4, 1], -1)
        step = F.softplus(step)
        keep = torch.exp(-step[..., None] * self.decay.exp())
        state, made = torch.zeros_like(keep[:, 0]), []
        for t in range(x.shape[1]):
            state = keep[:, t] * state + (step[:, t] * x[:, t])[..., None] * b[:, t, None]
            made.append((state * c[:, t, None]).sum(-1))
        return self.out(torch.stack(made, 1) * F.silu(gate))


@named
def selective_scan(batch: int) -> Example:
    """A state space model, its scan a Python loop."""
    return language_model(_Scan, batch)


@named
def half_parameters(batch: int) -> Example:
    """Parameters of bfloat16."""
    model, inputs = language_model(
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)), batch
    )
    return model.bfloat16(), inputs


@named
def cells(batch: int) -> Example:
    """nn.LSTMCell and nn.GRUCell in a Python loop."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.long, self.short = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = c = g = x.new_zeros(len(x), WIDTH)
            made = []
            for t in range(4):
                h, c = self.long(x[:, t], (h, c))
                g = self.short(h, g)
                made.append(g)
            return torch.stack(made, 1).mean(1, keepdim=True) * x

    return language_model(Loop, batch)


@named
def unfolded(batch: int) -> Example:
    """Local attention over windows by unfold, learned relative bias by index (as Swin), roll."""

    class Windows(nn.Module):
        def __init__(self, window: int = 4) -> None:
            super().__init__()
            self.window = window
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            self.bias = nn.Parameter(torch.zeros(2 * window - 1, HEADS))
            places = torch.arange(window)
            self.register_buffer("index", places[:, None] - places + window - 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.roll(x, -2, 1)
            parts = x.unfold(1, self.window, self.window).transpose(2, 3)
            q, k, v = self.qkv(parts).unflatten(-1, (3, HEADS, -1)).permute(3, 0, 1, 4, 2, 5)
            bias = self.bias[self.index.flatten()].view(self.window, self.window, HEADS).permute(2, 0, 1)
            weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias).softmax(-1)
            return torch.roll((weights @ v).permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2), 2, 1)

    return language_model(Windows, batch)
