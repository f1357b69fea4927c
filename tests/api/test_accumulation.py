"""Steps of several micro-batches on two gloo ranks against the model's own step over the whole batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
