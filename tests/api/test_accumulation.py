"""Steps of several micro-batches on two gloo ranks against the model's own step over the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.rewrite.test_microbatches import models
from tests.support.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def call(model: nn.Module, example: Any) -> Any:
    return model(**example) if isinstance(example, dict) else model(*example)


def loss_of(result: Any) -> torch.Tensor:
    return result["loss"] if isinstance(result, dict) else result[-1]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(_rank: int, name: str, cluster: str, fix: dict[str, int], scale: float = 1.0) -> list[float]:
    """Train both for three steps; return the losses of the compiled model."""
    reference, example = models()[name]
    mine = autopar.compile(copy.deepcopy(reference), cluster, example_inputs=example, fix=fix)
    both = (reference, mine)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in both]
    losses = []
    for _ in range(3):
        want, got = (loss_of(call(each, example)) for each in both)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        for loss, optimizer in zip((want, got), optimizers, strict=True):
            optimizer.zero_grad()
            (scale * loss).backward()
        for (key, a), b in zip(reference.named_parameters(), mine.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), key
            if a.grad is not None:
                assert (whole(b.grad) - a.grad).norm() <= 1e-4 * a.grad.norm() + 1e-6 * scale, key
        for optimizer in optimizers:
            optimizer.step()
        losses.append(got.item())
    for each in both:
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(call(mine, example)), loss_of(call(reference, example)))
    return losses


@pytest.mark.parametrize(
    "fix",
    [{"dp_replicate": 2, "microbatch": 1}, {"tp": 2, "microbatch": 2}, {"dp_shard": 2, "zero": 3, "microbatch": 1}],
    ids=["data", "tensor", "sharded"],
)
@pytest.mark.parametrize("name", ["mlp", "tied", "weighted"])
def test_steps_of_micro_batches_equal_the_whole_batchs(pool: RankPool, name: str, fix: dict[str, int]):
    first, second = pool.values(train, name, "cpu:2", fix)

    assert first == second


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_one_rank_accumulates_and_scales_with_the_loss(scale: float):
    train(0, "weighted", "cpu:1", {"microbatch": 2}, scale)
