"""What a plan says that a step holds, beside what torch's allocator hands out while the step runs."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.ir.plan_json import from_json, to_json
from benchmarks.memory import build, measure
from tests.support.ranks import RankPool

TOLERANCE = 0.05


def predicted_bytes(plan: autopar.Plan) -> int:
    """The plan's peak without the reserve, which stands for the process."""
    return plan.estimates.peak_memory_bytes - plan.estimates.memory.reserved


def measured_bytes(name: str, plan: autopar.Plan) -> int:
    model, inputs = build(name)
    cluster = autopar.ClusterSpec.from_dict(plan.cluster)
    compiled = autopar.compile(model, cluster, example_inputs=inputs, plan=plan)
    found = measure(compiled, inputs)
    return found["before"] + found["peak"]


def planned(name: str, ranks: int, fix: dict[str, Any]) -> autopar.Plan:
    model, inputs = build(name)
    return autopar.plan(model, f"cpu:{ranks}", example_inputs=inputs, optimizer="adamw", fix=fix)


def on_rank(_rank: int, name: str, plan: str) -> int:
    return measured_bytes(name, from_json(plan))


@pytest.mark.parametrize(
    ("name", "fix"), [("mlp", {}), pytest.param("gpt2", {}, marks=pytest.mark.slow), ("mlp", {"microbatch": 16})]
)
def test_one_rank_holds_what_its_plan_says(name: str, fix: dict[str, Any]):
    pytest.importorskip("transformers")
    plan = planned(name, 1, fix)

    assert predicted_bytes(plan) == pytest.approx(measured_bytes(name, plan), rel=TOLERANCE)


def test_outputs_of_all_micro_batches_are_in_the_plan():
    pytest.importorskip("transformers")
    plan = planned("llama", 1, {"microbatch": 2})

    assert predicted_bytes(plan) == pytest.approx(measured_bytes("llama", plan), rel=0.01)  # 4 % without


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("llama", {"tp": 2}),  # operators are deferred past the peak
        ("gpt2", {"pp": 2, "microbatch": 2}),
        ("mlp", {"dp_replicate": 2}),
        pytest.param("vit", {"dp_replicate": 2}, marks=pytest.mark.slow),
        ("bert", {"dp_shard": 2, "zero": 3}),
        ("mlp", {"tp": 2}),
        ("mlp", {"tp": 2, "microbatch": 8}),  # sums over micro-batches that no rank has to send
        pytest.param("resnet", {"tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_of_two_ranks_holds_what_the_plan_says(pool: RankPool, name: str, fix: dict[str, Any]):
    pytest.importorskip("transformers")
    plan = planned(name, 2, fix)

    outcomes = pool.run(on_rank, name, to_json(plan))

    assert [each.error for each in outcomes] == ["", ""]
    assert predicted_bytes(plan) == pytest.approx(max(each.value for each in outcomes), rel=TOLERANCE)
