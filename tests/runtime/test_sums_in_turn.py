"""Sums over micro-batches that other such sums are made of: the batch's mean, and what inputs differ from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.support.ranks import RankPool
from tests.support.training import whole

Weight = Callable[[torch.Tensor], Any]


class Weighted(nn.Module):
    """Weighs samples by numbers that inputs alone decide, and the batch."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.weight = weight

    def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
        """Return the loss, the weights, and two sums that some of them are made of."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        weight = self.weight(w)
        return (weight * (x - y).square().mean(-1)).mean(), weight, w.mean(), w.max()


KINDS: dict[str, Weight] = {
    "mean deviation": lambda w: w / (w - w.mean()).abs().mean(),
    "normalised": lambda w: w / w.abs().sum(),
    "effective": lambda w: w * (w.abs() / w.abs().sum()).square().sum(),
    "standardised by hand": lambda w: (w - w.mean()) / (w - w.mean()).square().mean().sqrt(),
    "advantages": lambda w: (w - w.mean()) / (w.std() + 1e-8),
    "three in turn": lambda w: w / ((w - w.mean()) / w.std()).abs().mean(),
    "both at once": lambda w: w * torch.stack(torch.var_mean(w, correction=0)).sum(),
    "largest": lambda w: w / w.max(),
    "softmax": lambda w: (w - w.max()).exp() / (w - w.max()).exp().sum(),
    "balanced": lambda w: w * (torch.stack([w > 0, w < 1], 1).sum(0).clamp(min=1) / 12).sqrt().sum(),
    "of two columns": lambda w: (w[:, None] ** torch.arange(1, 3) / (w[:, None] ** torch.arange(1, 3)).std(0)).sum(1),
    "between least and largest": lambda w: (w - w.amin(0)) / (w.amax(0) - w.amin(0)),
    "if any": lambda w: torch.where((w > 2).any(), w, -w),
    "if all": lambda w: torch.where((w > 2).all(), w, -w),
    "norm of order 3": lambda w: w / torch.linalg.vector_norm(w, ord=3),
    "norm of order 1": lambda w: w / torch.linalg.vector_norm(w, ord=1),
    "largest size": lambda w: w / torch.linalg.vector_norm(w, ord=float("inf")),
    "logarithm of a sum": lambda w: (w - w.logsumexp(0)).exp(),
    "number of samples": lambda w: w.abs() * torch.ones_like(w) / torch.ones_like(w).sum(),
    "none observed": lambda w: torch.where(w.new_zeros(w.shape) > 0, 0.0, w) / (1.0 + torch.zeros_like(w).sum()),
    "clipped": lambda w: w.clamp(max=w.mean() + w.std()),
}


def example(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model and its call."""
    torch.manual_seed(0)
    w = torch.randn(12) * torch.linspace(0.1, 3, 12)
    return Weighted(KINDS[name]).double(), tuple(each.double() for each in (*torch.randn(2, 12, 4), w))


def train(_rank: int, name: str, cluster: str, fix: dict[str, Any]) -> None:
    """Check what a step returns, and its gradients."""
    model, inputs = example(name)
    compiled = autopar.compile(example(name)[0], cluster, example_inputs=inputs, fix=fix, outputs="whole")

    wanted, found = model(*inputs), compiled(*inputs)
    wanted[0].backward()
    found[0].backward()

    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    expected = dict(model.named_parameters())
    for key, each in compiled.named_parameters():
        torch.testing.assert_close(whole(each.grad), expected[key].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_sums_of_inputs_are_those_of_the_whole_batch(name: str):
    train(0, name, "cpu:1", {"microbatch": 4})


@pytest.mark.parametrize("name", ["advantages", "softmax"])
def test_sums_in_turn_on_stages(pool: RankPool, name: str):
    pool.values(train, name, "cpu:2", {"pp": 2, "microbatch": 4})


def test_sums_in_turn_of_parts_of_micro_batches(pool: RankPool):
    pool.values(train, "three in turn", "cpu:2", {"dp_replicate": 2, "microbatch": 3})


class Scaled(nn.Module):
    """Averages its inputs in buffers, computes with what these are then, and weighs the loss by a sum of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("middle", torch.zeros(4))
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        self.middle.lerp_(x.mean(0), 0.1)
        self.size.lerp_(x.square().mean(), 0.1)
        x = (x - self.middle) * self.size
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - y).square().mean() * y.abs().mean()


def test_a_buffer_that_is_read_after_the_batch_was_added_up_in_it_has_its_sum_once():
    torch.manual_seed(0)
    model = Scaled().double()
    batches = torch.randn(3, 2, 12, 4, dtype=torch.float64)
    compiled = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=tuple(batches[0]), fix={"microbatch": 4})

    for batch in batches:
        torch.testing.assert_close(compiled(*batch), model(*batch), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dict(compiled.named_buffers()), dict(model.named_buffers()), rtol=1e-12, atol=1e-12)
