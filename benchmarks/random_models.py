"""Random models: what they read, a stack of residual blocks, and a loss, all drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.random_layers import LAYERS, Draw, Norm, parameter


class Block(nn.Module):
    """Layers, each added to what it reads, with a normalisation before or behind it."""

    def __init__(self, draw: Draw, kinds: Sequence[Callable[[Draw], nn.Module]]) -> None:
        super().__init__()
        self.before = draw.chance(0.7)
        self.layers = nn.ModuleList(kind(draw) for kind in kinds)
        self.norms = nn.ModuleList(Norm(draw) for _ in kinds)
        self.scale = nn.Parameter(torch.full((draw.width,), 0.5)) if draw.chance(0.2) else None

    def forward(self, x: Tensor) -> Tensor:
        """Return values of the same shape."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = layer(norm(x)) if self.before else norm(layer(x))
            x = x + 0.5 * (y if self.scale is None else y * self.scale)
        return x


class RandomModel(nn.Module):
    """Blocks behind an embedding, a product or a convolution, equal blocks in most cases; tied weights in some."""

    weights: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = Draw(seed)
        self.tokens, width = draw.tokens, draw.width
        self.reads = draw.one("tokens", "tokens", "segments", "values", "picture")
        self.vocab = draw.one(32, 30, 17)
        stems = {"values": nn.Linear(5, width), "picture": nn.Conv2d(3, width, 2, stride=2)}
        table = nn.Embedding(self.vocab, width, padding_idx=draw.one(None, 0))
        self.stem: nn.Module = stems.get(self.reads, table)
        self.segments = nn.Embedding(3, width)
        self.places = parameter(1, self.tokens, width, scale=0.5) if draw.chance() else None
        count, alike = draw.one(2, 3, 4, 4), draw.chance(0.6)
        kinds, state = draw.choices(LAYERS, k=draw.one(1, 2)), draw.getstate()
        self.blocks = nn.ModuleList()
        for _ in range(count):
            if alike:
                draw.setstate(state)
            self.blocks.append(Block(draw, kinds if alike else draw.choices(LAYERS, k=draw.one(1, 2))))
        self.final = Norm(draw)
        self.loss = draw.choice(sorted(LOSSES))
        self.head = nn.Linear(width, self.vocab, bias=draw.chance())
        if self.reads == "tokens" and draw.chance(0.3):
            self.head.weight = table.weight
        self.returns = draw.one("loss", "both")
        self.register_buffer("weights", torch.rand(self.vocab) + 0.5)

    def forward(self, x: Tensor, y: Tensor, w: Tensor, kinds: Tensor | None = None) -> Any:
        """Return the loss, with what it is made from in some models."""
        h = self.stem(x)
        h = h.flatten(2).transpose(1, 2) if self.reads == "picture" else h
        h = h if kinds is None else h + self.segments(kinds)
        h = h if self.places is None else h + self.places
        for block in self.blocks:
            h = block(h)
        h = self.final(h)
        loss, made = LOSSES[self.loss](self, h, y, w)
        return {"loss": loss, "made": made} if self.returns == "both" else loss


_Loss = tuple[Tensor, Tensor]


def _masked(m: RandomModel, h: Tensor, y: Tensor, w: Tensor) -> _Loss:
    z = m.head(h)
    each, kept = F.cross_entropy(z.mT, y, reduction="none"), (w > 0.4).to(h.dtype)
    return (each * kept).sum() / kept.sum().clamp(min=1), z


def _contrast(m: RandomModel, h: Tensor, y: Tensor, w: Tensor) -> _Loss:
    one, other = F.normalize(m.head(h.mean(1)), dim=-1), F.normalize(h[:, 0] @ m.head.weight.T, dim=-1)
    scores, own = one @ other.T / 0.2, torch.arange(h.shape[0])
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2, one


def _distilled(m: RandomModel, h: Tensor, y: Tensor, w: Tensor) -> _Loss:
    z = m.head(h)
    return F.kl_div(z.log_softmax(-1), z.detach().roll(1, -1).softmax(-1), reduction="batchmean"), z


def _several(m: RandomModel, h: Tensor, y: Tensor, w: Tensor) -> _Loss:
    z = m.head(h)
    beside = 0.1 * h.square().mean() + 0.01 * torch.logsumexp(z, -1).square().mean()
    return F.cross_entropy(z.flatten(0, 1), y.flatten()) + beside, z


def _of_tokens(**settings: Any) -> Callable[[Any, Tensor, Tensor, Tensor], _Loss]:
    def loss(m: RandomModel, h: Tensor, y: Tensor, w: Tensor) -> _Loss:
        z = m.head(h)
        return F.cross_entropy(z.flatten(0, 1), y.flatten(), **settings), z

    return loss


def _of_samples(m: RandomModel, h: Tensor, y: Tensor, w: Tensor) -> _Loss:
    z = m.head(h.mean(1))
    return F.cross_entropy(z, y[:, 0], label_smoothing=0.1), z


def _weighted(m: RandomModel, h: Tensor, y: Tensor, w: Tensor) -> _Loss:
    z = m.head(h)
    return F.cross_entropy(z.mT, y, weight=m.weights), z


def _squares(m: RandomModel, h: Tensor, y: Tensor, w: Tensor) -> _Loss:
    z = m.head(h)
    return F.mse_loss(z, torch.sin(z.detach() * 0.3 + w[..., None])), z


def _robust(m: RandomModel, h: Tensor, y: Tensor, w: Tensor) -> _Loss:
    z = m.head(h)[..., 0]
    return F.smooth_l1_loss(z, w), z


def _binary(m: RandomModel, h: Tensor, y: Tensor, w: Tensor) -> _Loss:
    z = m.head(h)[..., 0]
    return F.binary_cross_entropy_with_logits(z, (w > 0.5).to(z.dtype)), z


LOSSES: dict[str, Callable[[Any, Tensor, Tensor, Tensor], _Loss]] = {
    "tokens": _of_tokens(),
    "ignored": _of_tokens(ignore_index=3),
    "smoothed": _of_tokens(label_smoothing=0.1),
    "masked": _masked,
    "weighted": _weighted,
    "samples": _of_samples,
    "contrast": _contrast,
    "distilled": _distilled,
    "several": _several,
    "squares": _squares,
    "robust": _robust,
    "binary": _binary,
}


def example(seed: int, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model of a seed in training mode and its keyword arguments."""
    torch.manual_seed(seed)
    model = RandomModel(seed)
    shape = (batch, model.tokens)
    values = {"values": (*shape, 5), "picture": (batch, 3, 2, 2 * model.tokens)}.get(model.reads)
    x = torch.randint(model.vocab, shape) if values is None else torch.randn(*values)
    inputs = {"x": x, "y": torch.randint(model.vocab, shape), "w": torch.rand(*shape)}
    more = {"kinds": torch.randint(3, shape)} if model.reads == "segments" else {}
    return model.train(), {**inputs, **more}
