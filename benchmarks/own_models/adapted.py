"""Models changed after they were made, and models with unusual Python around them.

Frozen parts, tied and parametrized weights, quantised weights, hooks, results and arguments in containers, functional
calls, operators and derivatives of the user's own.

Shapes: b samples, t steps of a sequence, d features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, parametrize
from transformers.utils.generic import ModelOutput

from benchmarks.own_models.parts import (
    LAYERS,
    VOCABULARY,
    WIDTH,
    Around,
    Example,
    Tower,
    language_model,
    named,
    next_token,
    tokens,
)


def _mlp(inside: int = WIDTH, outside: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(inside), nn.Linear(inside, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, outside))


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class _Sparse(nn.Module):
    """A weight with places that are always zero."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.rand(shape) > 0.5).float())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class _Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        symmetric, sparse, orthogonal, tall = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        parametrize.register_parametrization(symmetric, "weight", _Symmetric())
        parametrize.register_parametrization(sparse, "weight", _Sparse(sparse.weight.shape))
        parametrizations.orthogonal(orthogonal, orthogonal_map="cayley")
        parametrizations.orthogonal(tall, orthogonal_map="matrix_exp")
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), symmetric, nn.Tanh(), sparse, nn.Tanh(), orthogonal, tall)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@named
def parametrized(batch: int) -> Example:
    """Symmetric, masked and orthogonal weights by torch's parametrizations."""
    return language_model(_Parametrized, batch)


class _Quantised(nn.Module):
    """Weights as they will be in 8 bits, gradients as if they were not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.step = nn.Parameter(torch.tensor(0.05))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.first.weight.detach().abs().amax(1) / 127
        zero = torch.zeros(WIDTH, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(self.first.weight, scale, zero, 0, -128, 127)
        x = F.relu(F.linear(x, weight, self.first.bias))
        x = torch.fake_quantize_per_tensor_affine(x, 0.05, 0, 0, 255)
        weight = self.second.weight / self.step
        weight = (weight + (weight.round().clamp(-8, 7) - weight).detach()) * self.step
        return F.linear(x, weight, self.second.bias)


@named
def quantisation_aware(batch: int) -> Example:
    """Fake quantisation by channel and by tensor, and a learned step with a straight-through gradient."""
    return language_model(_Quantised, batch)


class _LowBits(nn.Module):
    """A frozen weight in blocks of 8 bits, and what is learned beside it: low rank with a magnitude (DoRA)."""

    def __init__(self, rank: int = 4, block: int = 16) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH // block, block) / WIDTH**0.5
        scale = weight.abs().amax(-1, keepdim=True) / 127
        self.register_buffer("packed", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.to(torch.float32))
        self.down, self.up = nn.Parameter(torch.randn(rank, WIDTH) * 0.1), nn.Parameter(torch.randn(WIDTH, rank) * 0.1)
        self.magnitude = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        whole = (self.packed.float() * self.scale).flatten(1) + self.up @ self.down
        return F.linear(x, whole * (self.magnitude / whole.norm(dim=1)).unsqueeze(1))


@named
def low_bits(batch: int) -> Example:
    """A frozen base in int8 with scales, and low-rank weights with magnitudes beside it."""
    return language_model(_LowBits, batch)


class _Prompted(nn.Module):
    """A frozen tower with a few vectors before its tokens, its biases free, and its embedding also the head."""

    def __init__(self, prompt: int = 4) -> None:
        super().__init__()
        self.tower = Tower(_mlp)
        for name, each in self.tower.named_parameters():
            each.requires_grad_("bias" in name)
        self.tower.head.weight = self.tower.embed.weight
        self.prompt = nn.Parameter(torch.randn(prompt, WIDTH) * 0.1)
        self.mixing = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(len(x), -1, -1), self.tower.embed(x)], 1)
        for layer in self.tower.layers:
            x = x + layer(x) + x.mean(1, keepdim=True)
        return next_token(self.tower.head(self.mixing(x))[:, len(self.prompt) :], target)


@named
def prompted(batch: int) -> Example:
    """Prompt tuning and free biases on a frozen tower with a tied head."""
    return _Prompted(), {"x": tokens(batch), "target": tokens(batch)}


@dataclass
class Found(ModelOutput):
    """What a model of transformers returns, made by the user."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None
    past: Tensor | None = None


class Pair(NamedTuple):
    """Arguments that belong together."""

    tokens: Tensor
    valid: Tensor


class _Contained(nn.Module):
    """Arguments in tuples and dicts, results in a class, layers in dicts by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.by_kind = nn.ModuleDict({"text": _mlp(), "extra": _mlp(8)})
        self.scales = nn.ParameterDict({"text": torch.ones(WIDTH), "extra": torch.ones(1)})
        self.steps = nn.ParameterList(torch.full((1,), 0.5) for _ in range(LAYERS))
        self.layers = nn.ModuleList(_mlp() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, pair: Pair, extra: dict[str, Tensor], target: Tensor, past: Any = None, *, keep: bool) -> Found:
        x = self.by_kind["text"](self.embed(pair.tokens)) * self.scales["text"]
        x = x + (self.by_kind["extra"](extra["features"]) * self.scales["extra"]).unsqueeze(1)
        hidden = []
        for layer, step in zip(self.layers, self.steps, strict=True):
            x = torch.where(pair.valid.unsqueeze(-1), x + step * layer(x), x)
            hidden.append(x)
        logits = self.head(x)
        return Found(loss=next_token(logits, target), logits=logits, hidden=tuple(hidden) if keep else None, past=past)


@named
def contained(batch: int) -> Example:
    """Arguments and results in containers, some of them None or plain values."""
    return _Contained(), {
        "pair": Pair(tokens(batch), torch.rand(batch, 16) > 0.2),
        "extra": {"features": torch.randn(batch, 8)},
        "target": tokens(batch),
        "keep": False,
    }


class _Hooked(nn.Module):
    """A hook that scales what a layer returns, one that is called before, and a result kept aside for a second loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(_mlp() for _ in range(LAYERS))
        self.kept: list[Tensor] = []
        self.layers[0].register_forward_hook(lambda _module, _inputs, output: 2 * output)
        self.layers[1].register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 0.1,))
        self.layers[2].register_forward_hook(lambda _module, _inputs, output: self.kept.append(output))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        self.kept.clear()
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return next_token(self.head(x), target) + 0.1 * next_token(self.head(self.kept[0]), target)


@named
def hooked(batch: int) -> Example:
    """Forward hooks that change what layers read and return, and a feature kept by one."""
    return _Hooked(), {"x": tokens(batch), "target": tokens(batch)}


class _Generated(nn.Module):
    """A small network whose weights another one makes from a context, called functionally sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        for each in self.small.parameters():
            each.requires_grad_(requires_grad=False)
        self.sizes = {name: each.shape for name, each in self.small.named_parameters()}
        self.make = _mlp(WIDTH, sum(each.numel() for each in self.small.parameters()))

    def forward(self, context: Tensor, x: Tensor, y: Tensor) -> Tensor:
        made = self.make(context)
        split = made.split([shape.numel() for shape in self.sizes.values()], -1)
        weights = {name: each.view(-1, *shape) for (name, shape), each in zip(self.sizes.items(), split, strict=True)}
        found = vmap(lambda each, points: functional_call(self.small, each, (points,)))(weights, x)
        return F.mse_loss(found.squeeze(-1), y)


@named
def hypernetwork(batch: int) -> Example:
    """A hypernetwork: weights made from a context, a functional call under vmap."""
    return _Generated(), {
        "context": torch.randn(batch, WIDTH),
        "x": torch.randn(batch, 6, 4),
        "y": torch.randn(batch, 6),
    }


class _Adapting(nn.Module):
    """One step of gradient descent on a task's own samples, then the loss on others: the gradient passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        )
        self.rate = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, y: Tensor, other_x: Tensor, other_y: Tensor) -> Tensor:
        weights = dict(self.body.named_parameters())

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(functional_call(self.body, weights, (x,)).squeeze(-1), y)

        def task(x: Tensor, y: Tensor, other_x: Tensor, other_y: Tensor) -> Tensor:
            slope = grad(loss)(weights, x, y)
            adapted = {name: each - self.rate * slope[name] for name, each in weights.items()}
            return loss(adapted, other_x, other_y)

        return vmap(task)(x, y, other_x, other_y).mean()


@named
def meta_learning(batch: int) -> Example:
    """MAML: a gradient inside forward (torch.func), a task a sample."""
    return _Adapting(), {
        "x": torch.randn(batch, 5, 4),
        "y": torch.randn(batch, 5),
        "other_x": torch.randn(batch, 5, 4),
        "other_y": torch.randn(batch, 5),
    }


@torch.library.custom_op("benchmark_models::softcap", mutates_args=())
def softcap(x: Tensor, cap: float) -> Tensor:
    """Return values squashed between -cap and cap."""
    return torch.tanh(x / cap) * cap


@softcap.register_fake
def _(x: Tensor, cap: float) -> Tensor:
    return torch.empty_like(x)


def _softcap_saved(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.cap = inputs[1]


def _softcap_backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (output,) = context.saved_tensors
    return gradient * (1 - (output / context.cap) ** 2), None


softcap.register_autograd(_softcap_backward, setup_context=_softcap_saved)


class _OwnOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = _mlp()

    def forward(self, x: Tensor) -> Tensor:
        return softcap(self.body(x), 2.0)


@named
def own_operator(batch: int) -> Example:
    """An operator of the user's by torch.library, for which there is no rule."""
    return language_model(_OwnOperator, batch)


class _Settled(nn.Module):
    """A layer repeated until its result hardly changes: a fixed number of times without gradients, once with."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.again = nn.Linear(WIDTH, WIDTH), parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.inside(x)
        found = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(6):
                found = torch.tanh(self.again(found) + inside)
        return torch.tanh(self.again(found.detach()) + inside)


@named
def equilibrium(batch: int) -> Example:
    """A deep equilibrium with a one-step gradient, over a spectrally normed weight."""
    return language_model(_Settled, batch)


class _Compiled(nn.Module):
    """Layers that the user compiled, and one that is scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(_mlp(), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@named
def compiled_layers(batch: int) -> Example:
    """Layers under torch.compile inside the model."""
    return language_model(_Compiled, batch)


class _Several(nn.Module):
    """The layers' losses weighed by learned variances, gradients clipped or reversed on their way, one head frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), _mlp())
        self.heads = nn.ModuleList(nn.Linear(WIDTH, n) for n in (1, 4, 2))
        self.log_variance = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, value: Tensor, label: Tensor, domain: Tensor) -> dict[str, Tensor | None]:
        found = self.body(x)
        turned = 2 * found.detach() - found
        losses = torch.stack(
            [
                F.huber_loss(self.heads[0](found).squeeze(-1), value),
                F.cross_entropy(self.heads[1](found), label, weight=torch.tensor([1.0, 2.0, 0.5, 1.0])),
                F.cross_entropy(self.heads[2](turned), domain),
            ]
        )
        total = (losses * (-self.log_variance).exp() + self.log_variance).sum()
        return {"loss": total, "parts": losses.detach(), "nothing": None}


@named
def several_losses(batch: int) -> Example:
    """Losses with learned weights, a reversed gradient, results that are detached or None."""
    return _Several(), {
        "x": torch.randn(batch, 8),
        "value": torch.randn(batch),
        "label": torch.randint(4, (batch,)),
        "domain": torch.randint(2, (batch,)),
    }


@named
def frozen_statistics(batch: int) -> Example:
    """BatchNorm that stays in evaluation, over frozen convolutions, as fine-tuning has it."""
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, WIDTH, 3, 2, bias=False),
        _Frozen(WIDTH), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10),
    )  # fmt: skip
    body[0].requires_grad_(requires_grad=False)
    body[1] = _Frozen(16)
    return Around(body), {"x": torch.randn(batch, 3, 16, 16), "target": torch.randint(10, (batch,))}


class _Frozen(nn.BatchNorm2d):
    """BatchNorm whose mode the model's does not change."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.running_mean.normal_()
        self.eval()

    def train(self, mode: bool = True) -> _Frozen:
        return super().train(mode=False)
