"""Steps of several micro-batches on two gloo ranks against the model's own step over the whole batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.errors import InfeasibleError
from tests.rewrite.test_microbatches import models
from tests.support.ranks import RankPool
from tests.support.training import Trained, train


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def run(_rank: int, name: str, cluster: str, fix: dict[str, int], scale: float = 1.0) -> Trained:
    return train(*models()[name], cluster, fix, scale)


@pytest.mark.parametrize(
    "fix",
    [{"dp_replicate": 2, "microbatch": 1}, {"tp": 2, "microbatch": 2}, {"dp_shard": 2, "zero": 3, "microbatch": 1}],
    ids=["data", "tensor", "sharded"],
)
@pytest.mark.parametrize("name", ["mlp", "tied", "weighted"])
def test_steps_of_micro_batches_equal_the_whole_batchs(pool: RankPool, name: str, fix: dict[str, int]):
    first, second = pool.values(run, name, "cpu:2", fix)

    assert first.losses == second.losses
    assert max(first.worst_gradient, second.worst_gradient) < 1e-4


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_one_rank_accumulates_and_scales_with_the_loss(scale: float):
    done = run(0, "weighted", "cpu:1", {"microbatch": 2}, scale)

    assert done.worst_gradient < 1e-4


class Iterated(nn.Module):
    """Buffers that forward changes: the steps so far, and the weight's largest direction, nearer at each step."""

    def __init__(self, *, of_batch: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.of_batch = of_batch
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("direction", torch.randn(6))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        if self.training:
            self.steps += 1
            with torch.no_grad():
                self.direction.copy_(functional.normalize(self.weight.T @ (self.weight @ self.direction), dim=0))
                if self.of_batch:
                    self.last.copy_(x.sum())
        return (x @ self.weight / (self.weight @ self.direction).norm()).square().mean()


def test_buffers_change_once_a_step_however_many_micro_batches():
    torch.manual_seed(0)
    model = Iterated()
    mine = autopar.compile(Iterated(), "cpu:1", example_inputs=(torch.randn(8, 6),), fix={"microbatch": 2})
    mine.load_state_dict(model.state_dict())

    for _ in range(3):
        x = torch.randn(8, 6)
        torch.testing.assert_close(mine(x), model(x))

    assert mine.steps == model.steps == 3
    torch.testing.assert_close(mine.direction, model.direction)


def test_a_buffer_made_of_the_whole_batch_refuses_micro_batches_and_is_named():
    with pytest.raises(InfeasibleError, match=r"new value of buffer last comes of all samples"):
        autopar.plan(Iterated(of_batch=True), "cpu:1", example_inputs=(torch.randn(8, 6),), fix={"microbatch": 2})
