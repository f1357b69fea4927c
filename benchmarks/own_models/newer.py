"""Models with what others have not: alignments without given places, operators that mix whole tensors, kept features.

Shapes: b samples, t steps of a sequence, d features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.own_models.parts import LAYERS, SEQ, VOCABULARY, WIDTH, Example, Tower, named, next_token, tokens


def _mlp(inside: int = WIDTH, outside: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(inside), nn.Linear(inside, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, outside))


class _Aligned(nn.Module):
    """Frames to characters, aligned by the loss itself; every sample has its own lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 10)
        self.layers = nn.ModuleList(_mlp() for _ in range(LAYERS))
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(self, x: Tensor, target: Tensor, frames: Tensor, characters: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.loss(self.head(x).log_softmax(-1).transpose(0, 1), target, frames, characters)


@named
def alignment(batch: int) -> Example:
    """Connectionist temporal classification of padded targets."""
    return _Aligned(), {
        "x": torch.randn(batch, SEQ, 8),
        "target": torch.randint(1, 10, (batch, 5)),
        "frames": torch.randint(12, SEQ + 1, (batch,)),
        "characters": torch.randint(1, 6, (batch,)),
    }


class _Mixed(nn.Module):
    """A weight in blocks on the diagonal, rows of limited norm, numbers taken from a flat table, distances in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ParameterList(torch.randn(8, 8) * 0.1 for _ in range(WIDTH // 8))
        self.table = nn.Parameter(torch.randn(VOCABULARY * WIDTH) * 0.1)
        self.layers = nn.ModuleList(_mlp() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weight = torch.block_diag(*self.blocks)
        x = torch.take(self.table, x.unsqueeze(-1) * WIDTH + torch.arange(WIDTH)).mean(1) @ weight
        x = torch.renorm(x, 2, 0, 1.0)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), target) + 0.01 * weight.trace() + 0.1 * F.pdist(weight).mean()


@named
def mixed_whole(batch: int) -> Example:
    """block_diag, renorm, take, trace and pdist."""
    return _Mixed(), {"x": tokens(batch), "target": torch.randint(4, (batch,))}


class _Prefixed(nn.Module):
    """Prompt vectors by a small network before frozen tokens; the targets begin with a tensor that is no state."""

    def __init__(self, prompt: int = 4) -> None:
        super().__init__()
        self.tower = Tower(_mlp)
        self.tower.requires_grad_(requires_grad=False)
        self.prompt, self.make = nn.Embedding(prompt, WIDTH), _mlp()
        self.places, self.ignored = torch.arange(prompt), torch.full((prompt,), -100)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        prompt = self.make(self.prompt(self.places)).expand(len(x), -1, -1)
        x = torch.cat([prompt, self.tower.embed(x)], 1)
        for layer in self.tower.layers:
            x = x + layer(x) + x.mean(1, keepdim=True)
        return next_token(self.tower.head(x), torch.cat([self.ignored.expand(len(target), -1), target], 1))


@named
def prefixed(batch: int) -> Example:
    """p-tuning: prompts made by a network, constants before the targets."""
    return _Prefixed(), {"x": tokens(batch), "target": tokens(batch)}


class _Observed(nn.Module):
    """A feature that a hook keeps in a dict of the model, judged beside the result; classes in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.judge = Tower(_mlp), nn.Linear(WIDTH, VOCABULARY)
        self.features: dict[str, Tensor] = {}
        for number, layer in enumerate(self.tower.layers):
            layer.register_forward_hook(self.keeping(f"layer {number}"))

    def keeping(self, name: str):
        """Return a hook that keeps what a layer makes under a name."""

        def keep(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.features[name] = output

        return keep

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.tower(x)
        beside = self.judge(self.features["layer 1"])
        return F.cross_entropy(logits.transpose(1, 2), target) + 0.1 * F.cross_entropy(beside.transpose(1, 2), target)


@named
def observed(batch: int) -> Example:
    """Features kept by hooks, cross entropy over a permuted dimension."""
    return _Observed(), {"x": tokens(batch), "target": tokens(batch)}
