"""Plans with pipeline stages, and their steps on two gloo ranks against the model's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError, UsageError
from autopar.ir.plan_json import from_json, to_json
from tests.api.test_accumulation import call, loss_of, whole
from tests.rewrite.test_microbatches import models
from tests.support.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
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


class Mean(nn.Module):
    """The mean square of what a model makes, as its loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.body(x).square().mean()


def layers() -> tuple[nn.Module, Any]:
    torch.manual_seed(2)
    ids, labels = torch.randint(0, 16, (2, 12, 6))
    labels[:5, 2:] = -100
    return Layers(), (ids, labels)


def example(name: str) -> tuple[nn.Module, Any]:
    return layers() if name == "layers" else models()[name]


def train(_rank: int, name: str, fix: dict[str, Any]) -> tuple[list[float], list[str], float]:
    """Train both for three steps; return the losses, the names held here, and the largest error of a gradient."""
    reference, batch = example(name)
    mine = autopar.compile(copy.deepcopy(reference), "cpu:2", example_inputs=batch, fix=fix)
    both = (reference, mine)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in both]
    losses, worst = [], 0.0
    held = dict(mine.named_parameters(remove_duplicate=False))
    for _ in range(3):
        want, got = (loss_of(call(each, batch)) for each in both)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        for loss, optimizer in zip((want, got), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for key, parameter in reference.named_parameters(remove_duplicate=False):
            if key in held and parameter.grad is not None:
                error = (whole(held[key].grad) - parameter.grad).norm() / (parameter.grad.norm() + 1e-6)
                worst = max(worst, error.item())
        for optimizer in optimizers:
            optimizer.step()
        losses.append(got.item())
    for each in both:
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(call(mine, batch)), loss_of(call(reference, batch)))
    return losses, sorted(held), worst


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("layers", {"microbatch": 2}),
        ("layers", {"microbatch": 4}),
        ("layers", {"microbatch": 2, "schedule": "gpipe"}),
        ("layers", {"microbatch": 3, "interleave": 2}),
        ("layers", {"microbatch": 2, "schedule": "zb_h1"}),
        ("layers", {"microbatch": 3, "schedule": "zbv"}),
        ("layers", {"microbatch": 12, "schedule": "zbv"}),
        ("weighted", {"microbatch": 2, "schedule": "zb_h1"}),
        ("mlp", {"microbatch": 2}),
        ("tied", {"microbatch": 1}),
        ("weighted", {"microbatch": 2}),
    ],
    ids=str,
)
def test_steps_in_stages_equal_the_models_own(pool: RankPool, name: str, fix: dict[str, Any]):
    (first, here, a), (second, there, b) = pool.values(train, name, {"pp": 2, **fix})

    assert first == second
    assert max(a, b) < 1e-4
    names = {key for key, _ in example(name)[0].named_parameters(remove_duplicate=False)}
    assert {*here, *there} == names
    assert {*here} != names or {*there} != names


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


def test_zero_bubble_is_predicted_faster_than_1f1b_in_memory_of_the_same_order():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(8)), nn.Linear(4096, 1))
        batch = (torch.empty(16 * 2048, 4096),)
    model = Mean(model)

    plans = {
        name: autopar.plan(
            model, "h100-sxm-80gb:4", example_inputs=batch, fix={"pp": 4, "microbatch": 2048, "schedule": name}
        ).estimates
        for name in ("1f1b", "zb_h1", "zbv")
    }

    steps = {name: each.step_time_s for name, each in plans.items()}
    assert steps["zb_h1"] < steps["1f1b"]
    assert plans["zb_h1"].breakdown.bubble_s < plans["1f1b"].breakdown.bubble_s / 2
    static = plans["1f1b"].memory.total - plans["1f1b"].memory.activations
    held = {name: max(stage.peak_memory_bytes for stage in each.per_stage) - static for name, each in plans.items()}
    assert held["zb_h1"] <= 2 * held["1f1b"]
    assert held["zbv"] <= 2 * held["1f1b"]


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
