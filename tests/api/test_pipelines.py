"""Plans with pipeline stages, and their steps on two gloo ranks against the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError, UsageError
from autopar.ir.plan_json import from_json, to_json
from benchmarks import unet
from tests.rewrite.test_microbatches import models
from tests.support.ranks import RankPool
from tests.support.training import Trained, train


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


class Layers(nn.Module):
    """Blocks of unequal size; a table is read by the first and, tied, by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.GELU(), nn.Linear(w, 8)) for w in (8, 16, 8, 24))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and loss."""
        hidden = self.embed(ids)
        first = hidden
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden + first)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers() -> tuple[nn.Module, Any]:
    torch.manual_seed(2)
    ids, labels = torch.randint(0, 16, (2, 12, 6))
    labels[:5, 2:] = -100
    return Layers(), (ids, labels)


def example(name: str) -> tuple[nn.Module, Any]:
    if name == "unet":
        return unet.example(6)
    return layers() if name == "layers" else models()[name]


def run(_rank: int, name: str, fix: dict[str, Any], ranks: int = 2) -> Trained:
    return train(*example(name), f"cpu:{ranks}", fix)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("layers", {"microbatch": 2}),
        ("layers", {"microbatch": 4}),
        ("layers", {"microbatch": 2, "schedule": "gpipe"}),
        ("layers", {"microbatch": 3, "interleave": 2}),
        ("mlp", {"microbatch": 2}),
        ("tied", {"microbatch": 1}),
        ("weighted", {"microbatch": 2}),
        ("experts", {"microbatch": 4}),
        ("unet", {"microbatch": 2}),
    ],
    ids=str,
)
def test_steps_in_stages_equal_the_models_own(pool: RankPool, name: str, fix: dict[str, Any]):
    require_the_models_own(name, pool.values(run, name, {"pp": 2, **fix}))


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("unet", {"pp": 4, "microbatch": 1}),
        ("layers", {"pp": 2, "dp_replicate": 2, "microbatch": 2}),
        ("layers", {"pp": 2, "tp": 2, "microbatch": 4}),
    ],
    ids=str,
)
def test_steps_in_stages_of_several_ranks_equal_the_models_own(four: RankPool, name: str, fix: dict[str, Any]):
    require_the_models_own(name, four.values(run, name, fix, 4))


def require_the_models_own(name: str, done: list[Trained]) -> None:
    """Check that all ranks trained as one device does, and that together they hold every parameter, none alone."""
    names = {key for key, _ in example(name)[0].named_parameters(remove_duplicate=False)}
    assert all(each.losses == done[0].losses for each in done)
    assert max(each.worst_gradient for each in done) < 1e-4
    assert {key for each in done for key in each.held} == names
    assert any({*each.held} != names for each in done)


def test_a_plan_says_its_stages_and_survives_the_file():
    model, batch = layers()

    plan = autopar.plan(model, "cpu:4", example_inputs=batch, fix={"pp": 2, "dp_replicate": 2, "microbatch": 2})

    assert plan.decisions.degrees["pp"] == 2
    assert [stage.ranks for stage in plan.decisions.stages] == [(0, 1), (2, 3)]
    assert [path for stage in plan.decisions.stages for path in stage.blocks] == [f"layers.{i}" for i in range(4)]
    assert plan.decisions.schedule.name == "1f1b"
    assert plan.decisions.schedule.num_microbatches == 3
    parts = plan.estimates.breakdown
    total = parts.compute_s + parts.exposed_communication_s + parts.bubble_s + parts.optimizer_s
    assert total == pytest.approx(plan.estimates.step_time_s, rel=0.2)
    assert parts.bubble_s > 0
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize(
    ("fix", "kind", "text"),
    [
        ({"pp": 8}, InfeasibleError, "8 pipeline stages, and the model has 4 blocks to cut between"),
        ({"pp": 2, "microbatch": 5}, UsageError, "does not divide into micro-batches of 5"),
        ({"pp": 3}, InfeasibleError, "do not divide the cluster's 8 devices"),
        ({"schedule": "gpipe", "pp": 1}, UsageError, "needs pipeline stages: add --fix pp=N"),
    ],
    ids=["stages", "micro-batch", "degree", "schedule"],
)
def test_impossible_pipelines_say_why(fix: dict[str, Any], kind: type[Exception], text: str):
    model, batch = layers()

    with pytest.raises(kind, match=text):
        autopar.plan(model, "cpu:8", example_inputs=batch, fix=fix)
