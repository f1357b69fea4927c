"""Layers that random models are drawn from: [sample, token, feature] to the same, in the many ways that models compute.

Each is made from a `Draw`, which says how wide and long values are, and chooses what is left open.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

_Any = TypeVar("_Any")


class Draw(random.Random):
    """Choices from a seed, for values of so many tokens and features."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.tokens = self.choice((6, 7, 8, 8, 8, 12))
        self.width = self.choice((12, 16, 16, 16, 20, 24))

    def one(self, *values: _Any) -> _Any:
        """Return one of some values."""
        return self.choice(values)

    def chance(self, share: float = 0.5) -> bool:
        """Return true in that share of cases."""
        return self.random() < share

    def heads(self) -> int:
        """Return a number of heads that divides the width."""
        return self.choice([heads for heads in (1, 2, 3, 4, 6) if self.width % heads == 0])


def parameter(*shape: int, scale: float | None = None) -> nn.Parameter:
    """Return drawn values, of products over the last dimension about 1."""
    return nn.Parameter(torch.randn(*shape) * (shape[-1] ** -0.5 if scale is None else scale))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


class Feed(nn.Module):
    """Two products with something between them."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        width, self.hidden = draw.width, draw.width * draw.one(1, 2, 3)
        self.kind = draw.one("plain", "gate", "chunk", "split", "matrices", "addmm", "einsum", "conv", "tied")
        self.act, double = draw.one(*ACTIVATIONS), self.kind in {"chunk", "split"}
        self.up = nn.Linear(width, self.hidden * (1 + double), bias=draw.chance())
        self.gate, self.down = nn.Linear(width, self.hidden), nn.Linear(self.hidden, width)
        self.first, self.bias = parameter(width, self.hidden, scale=width**-0.5), parameter(self.hidden)
        self.second = parameter(self.hidden, width, scale=self.hidden**-0.5)
        self.wide, self.narrow = nn.Conv1d(width, self.hidden, 1), nn.Conv1d(self.hidden, width, 1)

    def forward(self, x: Tensor) -> Any:
        """Return values of the same shape."""
        act = ACTIVATIONS[self.act]
        if self.kind == "plain":
            return self.down(act(self.up(x)))
        if self.kind == "gate":
            return self.down(act(self.gate(x)) * self.up(x))
        if self.kind == "chunk":
            one, other = self.up(x).chunk(2, -1)
            return self.down(act(one) * other)
        if self.kind == "split":
            one, other = torch.split(self.up(x), [self.hidden, self.hidden], dim=-1)
            return self.down(other * torch.sigmoid(one))
        if self.kind == "matrices":
            return act(x @ self.first + self.bias) @ self.second
        if self.kind == "addmm":
            flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.first)
            return (act(flat) @ self.second).view(*x.shape)
        if self.kind == "einsum":
            return torch.einsum("bsh,hd->bsd", act(torch.einsum("bsd,dh->bsh", x, self.first)), self.second)
        if self.kind == "conv":
            return self.narrow(act(self.wide(x.transpose(1, 2)))).transpose(1, 2)
        return F.linear(act(F.linear(x, self.first.t())), self.first)


class Attention(nn.Module):
    """Attention, its heads laid out and its scores made in one of the usual ways."""

    apart: Tensor
    mask: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        width, tokens = draw.width, draw.tokens
        self.heads = draw.heads()
        self.size = width // self.heads
        self.form = draw.one("apart", "view", "chunk", "interleaved")
        self.how = draw.one("sdpa", "causal", "mask", "scores", "mixed", "biased", "cosine", "linear", "repeated")
        divisors = [each for each in (1, 2, 3, self.heads) if self.heads % each == 0]
        self.groups = draw.choice(divisors) if self.form == "apart" else self.heads
        self.q, self.kv = nn.Linear(width, width, bias=draw.chance()), nn.Linear(width, 2 * self.groups * self.size)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix, self.table = parameter(self.heads, self.heads, scale=1.0), nn.Embedding(2 * tokens - 1, self.heads)
        self.heat = nn.Parameter(torch.ones(self.heads, 1, 1)) if draw.chance(0.3) else None
        place = torch.arange(tokens)
        self.register_buffer("apart", place[:, None] - place[None] + tokens - 1)
        self.register_buffer("mask", torch.ones(tokens, tokens, dtype=torch.bool).tril(), persistent=False)
        self.turns = self.size % 2 == 0 and draw.chance(0.4)
        angle = place[:, None] / 100 ** (torch.arange(0, self.size, 2) / self.size)
        self.register_buffer("cos", torch.cat([angle, angle], -1)[:, : self.size].cos())
        self.register_buffer("sin", torch.cat([angle, angle], -1)[:, : self.size].sin())

    def _parts(self, x: Tensor) -> tuple[Any, Any, Any]:
        samples, tokens, _ = x.shape
        if self.form == "apart":
            q = self.q(x).view(samples, tokens, self.heads, self.size).transpose(1, 2)
            k, v = self.kv(x).view(samples, tokens, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
            return q, k, v
        if self.form == "view":
            q, k, v = self.qkv(x).reshape(samples, tokens, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
            return q, k, v
        if self.form == "chunk":
            q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
            return q, k, v
        q, k, v = self.qkv(x).view(samples, tokens, self.heads, 3 * self.size).transpose(1, 2).split(self.size, -1)
        return q, k, v

    def _turned(self, x: Tensor) -> Any:
        one, other = x.chunk(2, -1)
        return x * self.cos + torch.cat([-other, one], -1) * self.sin

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        if self.how == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        if self.how in {"causal", "repeated"}:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.how == "mask":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        if self.how == "linear":
            q, k = F.elu(q) + 1, F.elu(k) + 1
            whole = 1 / (torch.einsum("bhsd,bhd->bhs", q, k.sum(2)) + 1e-3)
            return torch.einsum("bhsd,bhde,bhs->bhse", q, torch.einsum("bhsd,bhse->bhde", k, v), whole)
        if self.how == "cosine":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scores = q @ k.transpose(-1, -2) * self.size**-0.5
        if self.how == "scores":
            scores = scores.masked_fill(~self.mask, float("-inf"))
        if self.how == "mixed":
            scores = torch.einsum("bhst,hg->bgst", scores, self.mix)
        if self.how == "biased":
            scores = scores + self.table(self.apart).permute(2, 0, 1)
        return scores.softmax(-1) @ v

    def forward(self, x: Tensor) -> Any:
        """Return values of the same shape."""
        q, k, v = self._parts(x)
        if self.turns:
            q, k = self._turned(q), self._turned(k)
        times = self.heads // self.groups
        if times > 1 and self.how == "repeated":
            k, v = (each[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for each in (k, v))
        elif times > 1:
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        q = q if self.heat is None else q * self.heat
        return self.out(self._attend(q, k, v).transpose(1, 2).reshape(x.shape))


class Mixed(nn.Module):
    """What changes the values of one token by those of others, or of one feature by others; then a product."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        width, tokens = draw.width, draw.tokens
        even = {name for name in MIXES if name not in ODD or tokens % 2 == 0}
        self.kind = draw.choice(sorted(even))
        self.out, self.wide, self.score = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, 1)
        self.pair, self.dense = nn.Linear(2 * width, 2 * width), nn.Linear(tokens, tokens)
        self.near = nn.Conv1d(width, width, 3, groups=draw.one(1, 2, width), padding=1)
        self.late = nn.Conv1d(width, width, 3, groups=width)
        self.plane, self.groups = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width)
        self.p, self.r, self.code = parameter(width, scale=1.0), parameter(width, scale=1.0), parameter(5, width)
        self.shift, self.slope = parameter(2 * tokens - 1, scale=0.3), nn.PReLU()
        place = torch.arange(tokens)
        self.register_buffer("place", place[:, None] - place[None] + tokens - 1)
        self.register_buffer("order", torch.randperm(tokens))
        self.register_buffer("features", torch.randperm(width))

    def forward(self, x: Tensor) -> Any:
        """Return values of the same shape."""
        return x + 0.3 * self.out(MIXES[self.kind](self, x))


def _film(m: Mixed, x: Tensor) -> Any:
    scale, shift = m.wide(x.mean(1)).chunk(2, -1)
    return x * (1 + scale[:, None]) + shift[:, None]


def _slots(m: Mixed, x: Tensor) -> Any:
    share = torch.einsum("kd,bsd->bks", m.code, x).softmax(1)
    share = share / share.sum(-1, keepdim=True)
    return torch.einsum("bks,bkd->bsd", share, torch.einsum("bks,bsd->bkd", share, x))


def _best(m: Mixed, x: Tensor) -> Any:
    at = m.score(x).squeeze(-1).topk(3, dim=1).indices
    return torch.gather(x, 1, at[..., None].expand(-1, -1, x.shape[-1])).mean(1, keepdim=True).expand_as(x)


def _plane(m: Mixed, x: Tensor) -> Any:
    return F.relu(m.plane(x.transpose(1, 2).unflatten(-1, (2, -1)))).flatten(2).transpose(1, 2)


def _turned(m: Mixed, x: Tensor) -> Any:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turn = torch.polar(torch.ones_like(m.p[: pairs.shape[-1]]), m.p[: pairs.shape[-1]])
    return torch.view_as_real(pairs * turn).flatten(-2)


def _loop(m: Mixed, x: Tensor) -> Any:
    state, found = torch.zeros_like(x[:, 0]), []
    for at in range(x.shape[1]):
        state = torch.tanh(m.wide(x[:, at] + state).chunk(2, -1)[0])
        found.append(state)
    return torch.stack(found, 1)


def _window(m: Mixed, x: Tensor) -> Any:
    return m.pair(x.reshape(x.shape[0], x.shape[1] // 2, -1)).reshape(x.shape)


ODD = {"window", "halves", "plane"}
"""Mixes that need an even number of tokens."""

MIXES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dense": lambda m, x: m.dense(x.mT).mT,
    "near": lambda m, x: m.near(x.mT).mT,
    "late": lambda m, x: m.late(F.pad(x.mT, (2, 0))).mT,
    "roll": lambda m, x: torch.roll(x, (1, 2), dims=(1, 2)) * m.p,
    "cumsum": lambda m, x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(1, -1, 1),
    "logcumsumexp": lambda m, x: torch.logcumsumexp(x, 1) * m.p,
    "cumprod": lambda m, x: torch.sigmoid(x).cumprod(-1),
    "fourier": lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1, norm="ortho") * m.p, x.shape[1], 1, "ortho"),
    "pooled": lambda m, x: x - F.avg_pool1d(x.mT, 3, 1, 1).mT + F.max_pool1d(x.mT, 3, 1, 1).mT,
    "window": _window,
    "halves": lambda m, x: torch.cat([x[:, 0::2] + x[:, 1::2], x[:, 0::2] - x[:, 1::2]], 1),
    "shift": lambda m, x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "flip": lambda m, x: x.flip(1) * m.p + x.flip(-1),
    "order": lambda m, x: x[:, m.order][..., m.features],
    "sorted": lambda m, x: x.sort(1).values + x.sort(-1, descending=True).values,
    "unfold": lambda m, x: F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).amax(-1),
    "resized": lambda m, x: F.interpolate(F.interpolate(x.mT, scale_factor=2.0, mode="linear"), x.shape[1]).mT,
    "toeplitz": lambda m, x: torch.einsum("ts,bsd->btd", m.shift[m.place], x),
    "difference": lambda m, x: torch.diff(x, dim=1, prepend=x[:, :1]),
    "film": _film,
    "squeezed": lambda m, x: x * torch.sigmoid(m.wide(x.mean(1, keepdim=True)).chunk(2, -1)[0]),
    "attended": lambda m, x: (m.score(x).softmax(1) * x).sum(1, keepdim=True).expand_as(x),
    "largest": lambda m, x: x - x.amax(1, keepdim=True) * m.p,
    "spread": lambda m, x: x / (x.std(1, keepdim=True) + 0.3) + x.var((1, 2), unbiased=False, keepdim=True),
    "logsumexp": lambda m, x: x * torch.logsumexp(x, -1, keepdim=True),
    "best": _best,
    "gram": lambda m, x: x @ (x.mT @ x / x.shape[1]).softmax(-1),
    "slots": _slots,
    "where": lambda m, x: torch.where(x > 0, x * m.p, x * m.r).clamp(-2, 2),
    "powers": lambda m, x: x.pow(2) * m.p - x**3 * 0.1 + m.r.abs().sqrt(),
    "exponentials": lambda m, x: torch.exp(-x.square()) * m.p + torch.log1p(x.abs()),
    "softmaxes": lambda m, x: x.softmax(-1) * m.p + x.log_softmax(1) * m.r,
    "lengths": lambda m, x: x / (x.norm(dim=-1, keepdim=True) + 0.1) + x.norm(p=1, dim=1, keepdim=True) * 0.1,
    "lerp": lambda m, x: torch.lerp(x, m.near(x.mT).mT, torch.sigmoid(m.p)),
    "glu": lambda m, x: F.glu(m.wide(x), -1),
    "maxout": lambda m, x: m.wide(x).unflatten(-1, (-1, 2)).amax(-1),
    "slope": lambda m, x: m.slope(x),
    "shuffled": lambda m, x: x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) * m.p,
    "outer": lambda m, x: torch.einsum("bsi,bsj,j->bsi", x, torch.tanh(x), m.p) / x.shape[-1],
    "cosine": lambda m, x: x * F.cosine_similarity(x, m.p.expand_as(x), dim=-1)[..., None],
    "distances": lambda m, x: (-torch.cdist(x, m.code)).softmax(-1) @ m.code,
    "turned": _turned,
    "nearest": lambda m, x: m.code[(x @ m.code.T).argmax(-1)] * m.p + x,
    "median": lambda m, x: x - x.median(-1, keepdim=True).values,
    "straight_through": lambda m, x: x + (torch.round(x * 4) / 4 - x).detach(),
    "plane": _plane,
    "groups": lambda m, x: m.groups(x.mT).mT,
    "loop": _loop,
}
"""By name: the layer, which has parameters for all of them, and its input."""


class Experts(nn.Module):
    """Experts that are all computed, and weighted by a router."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        width, count = draw.width, draw.one(2, 3, 4)
        self.kind, self.router = draw.one("all", "two", "most", "listed"), nn.Linear(width, count)
        self.first = parameter(count, width, width, scale=width**-0.5)
        self.second = parameter(count, width, width, scale=width**-0.5)

    def forward(self, x: Tensor) -> Any:
        """Return values of the same shape."""
        share = self.router(x).softmax(-1)
        if self.kind == "two":
            most, at = share.topk(2, -1)
            share = torch.zeros_like(share).scatter(-1, at, most / most.sum(-1, keepdim=True))
        if self.kind == "most":
            share = share * F.one_hot(share.argmax(-1), share.shape[-1]).to(share.dtype)
        if self.kind == "listed":
            each = [share[..., [e]] * (F.silu(x @ self.first[e]) @ self.second[e]) for e in range(share.shape[-1])]
            return torch.stack(each).sum(0)
        hidden = F.silu(torch.einsum("bsd,edf->bsef", x, self.first))
        return torch.einsum("bsef,efd,bse->bsd", hidden, self.second, share)


_OF_TORCH = ("attention", "encoder", "decoder", "gru", "lstm", "rnn", "bilinear", "weight_norm", "frozen")


class Library(nn.Module):
    """A module of torch's own."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        width = draw.width
        self.kind = draw.one(
            "attention", "encoder", "decoder", "gru", "lstm", "rnn", "bilinear", "weight_norm", "frozen"
        )
        self.memory, self.down, self.up = parameter(1, 4, width), nn.Linear(width, 4), nn.Linear(4, width)
        self.own: nn.Module
        if self.kind == "attention":
            self.own = nn.MultiheadAttention(width, draw.heads(), batch_first=True)
        elif self.kind == "encoder":
            order = draw.chance()
            self.own = nn.TransformerEncoderLayer(width, draw.heads(), 32, 0.0, batch_first=True, norm_first=order)
        elif self.kind == "decoder":
            self.own = nn.TransformerDecoderLayer(width, draw.heads(), 32, 0.0, batch_first=True)
        elif self.kind == "lstm":
            self.own = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        elif self.kind in {"gru", "rnn"}:
            self.own = (nn.GRU if self.kind == "gru" else nn.RNN)(width, width, batch_first=True)
        elif self.kind == "bilinear":
            self.own = nn.Bilinear(width, width, width)
        else:
            self.own = nn.Linear(width, width).requires_grad_(self.kind == "weight_norm")
            if self.kind == "weight_norm":
                nn.utils.parametrizations.weight_norm(self.own)

    def forward(self, x: Tensor) -> Any:
        """Return values of the same shape."""
        if self.kind == "attention":
            return self.own(x, x, x, need_weights=False)[0]
        if self.kind == "decoder":
            return self.own(x, self.memory.expand(x.shape[0], -1, -1))
        if self.kind == "bilinear":
            return 0.3 * self.own(x, torch.tanh(x))
        if self.kind == "frozen":
            return self.own(x) + 2.0 * self.up(self.down(x))
        return self.own(x)[0] if self.kind in {"gru", "lstm", "rnn"} else self.own(x)


class Norm(nn.Module):
    """A normalisation, of torch's or by hand, or none."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.kind = draw.one("layer", "layer", "rms", "by_hand", "deviation", "groups", "none")
        self.layer, self.rms = nn.LayerNorm(draw.width, bias=draw.chance()), nn.RMSNorm(draw.width, eps=1e-5)
        self.groups, self.weight = nn.GroupNorm(2, draw.width), nn.Parameter(torch.ones(draw.width))

    def forward(self, x: Tensor) -> Any:
        """Return values of the same shape."""
        if self.kind == "by_hand":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight
        if self.kind == "deviation":
            return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3) * self.weight
        if self.kind == "groups":
            return self.groups(x.mT).mT
        return x if self.kind == "none" else (self.layer if self.kind == "layer" else self.rms)(x)


LAYERS: tuple[Callable[[Draw], nn.Module], ...] = (Feed, Attention, Mixed, Mixed, Mixed, Experts, Library)
"""As often as each is drawn."""
