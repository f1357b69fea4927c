"""Data parallelism where parameters outweigh the batch: activations travel, parameters and their gradients stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import autopar
from autopar.ir.placement import Partial, Replicate, Shard
from autopar.strategies import axis_strategies
from autopar.strategies.compose import AxisSpec, Choices, compose
from benchmarks.testbed.scenarios import SCENARIOS
from tests.support.ranks import RankPool
from tests.support.remembering import remembered
from tests.support.training import Trained, train

VOCAB, WIDTH, ROWS = 512, 128, 16
CATALOGUED = Path(__file__).parents[2] / "benchmarks" / "testbed" / "cluster_1gbit.yaml"
FEW, MANY = 8, 4096
"""Tokens of a batch, whose table of `VOCAB` rows weighs more and less than they do."""

HOSTS = {
    "version": 1,
    "name": "hosts",
    "nodes": {"host": {"device": "cpu", "count": 1, "nic": {"bandwidth": "200 Mbit/s", "latency": "100us"}}},
    "groups": [{"node": "host", "count": 2}],
}


class Tokens(nn.Module):
    """A table, two square layers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens [batch]."""
        return self.second(F.relu(self.first(self.table(x)))).square().mean()


def tokens(count: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Tokens(), (torch.randint(VOCAB, (count,)),)


def offered(count: int, **axis: Any) -> dict[str, set[str]]:
    """Return what a batch axis offers, by operator target and the shape it makes."""
    graph = remembered(*tokens(count)).graph
    choices: Choices = compose(graph, (AxisSpec(2, "batch", **axis),), axis_strategies)
    return {
        f"{op.target.split('.')[1]} {list(op.outputs[0].shape) if op.outputs[0] else ''}": {
            f"{','.join(map(str, each.axes[0].inputs))}->{each.axes[0].outputs[0]}" for each in choices.of[op.name]
        }
        for op in graph.ops
        if op.kind == "call" and op.name in choices.of
    }


GRADIENT = f"embedding_dense_backward [{VOCAB}, {WIDTH}]"


def test_the_gradient_of_a_whole_table_is_made_on_every_rank_from_what_all_of_them_send():
    assert offered(FEW, shard_parameters=False)[GRADIENT] == {
        f"{Shard(0)},{Shard(0)}->{Partial()}",
        f"{Replicate()},{Replicate()}->{Replicate()}",
    }


def test_a_sharded_table_is_looked_up_and_its_gradient_made_where_its_rows_are():
    found = offered(FEW)

    assert f"{Replicate()},{Replicate()}->{Shard(0)}" in found[GRADIENT]
    assert f"{Shard(0)},{Replicate()}->{Partial()}" in found[f"embedding [{FEW}, {WIDTH}]"]


@pytest.mark.parametrize(("count", "axis"), [(MANY, {}), (FEW, {"moves_activations": False})], ids=["many", "refused"])
def test_where_the_batch_outweighs_the_table_or_nothing_may_move_the_batch_split_is_followed(count: int, axis: Any):
    whole = offered(count, shard_parameters=False, **axis)

    assert all(len(each) == 1 for each in whole.values())
    assert whole[GRADIENT] == {f"{Shard(0)},{Shard(0)}->{Partial()}"}
    assert offered(count, **axis)[f"embedding [{count}, {WIDTH}]"] == {f"{Replicate()},{Shard(0)}->{Shard(0)}"}


def test_what_is_gathered_for_the_gradient_of_tokens_serves_that_of_positions():
    model, batch = SCENARIOS["gpt_balanced"].build()

    plan = autopar.plan(model, CATALOGUED, example_inputs=batch, fix={"pp": 1}, optimizer="adamw")

    made = plan.decisions.operators["embedding_dense_backward"]
    alike = [each for each in plan.decisions.operators.values() if each.inputs[:1] == made.inputs[:1]]
    assert {each.strategy.inputs[0] for each in alike if "sum" in each.target} == {(Replicate(),)}
    end_s = max(each.end_s for each in plan.estimates.timeline)
    assert 0 < end_s + plan.estimates.breakdown.optimizer_s < 1.2 * plan.estimates.step_time_s


def planned(count: int, **fix: int) -> autopar.Plan:
    model, batch = tokens(count)
    return autopar.plan(model, autopar.ClusterSpec.from_dict(HOSTS), example_inputs=batch, fix=fix)


@pytest.mark.parametrize("fix", [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}], ids=["whole", "sharded"])
def test_fewer_bytes_than_the_parameters_have_travel_for_a_small_batch(fix: dict[str, int]):
    plan = planned(ROWS, **fix)

    held = sum(4 * each.numel() for each in Tokens().parameters())
    moved = sum(each.bytes * each.count for each in plan.decisions.collectives)
    assert {each.op for each in plan.decisions.collectives} >= {"all_gather"}
    assert moved < held  # a third or less of what gathering and scattering them takes
    assert all(plan.decisions.degrees[key] == degree for key, degree in fix.items() if key != "zero")


def trained(rank: int, fix: dict[str, Any]) -> Trained:
    del rank
    model, batch = tokens(ROWS)
    return train(model, batch, autopar.ClusterSpec.from_dict(HOSTS), fix)


@pytest.mark.parametrize(
    "fix",
    [
        {"dp_replicate": 2},
        {"dp_shard": 2, "zero": 3},
        {"dp_replicate": 2, "microbatch": 4},
        {"dp_shard": 2, "zero": 1},
    ],
    ids=str,
)
def test_what_moved_trains_like_one_device(pool: RankPool, fix: dict[str, Any]):
    first, second = pool.values(trained, fix)

    assert first.losses == second.losses
    assert max(first.worst_gradient, second.worst_gradient) < 1e-5
