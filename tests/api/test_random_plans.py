"""Random models on random clusters under random wishes: what holds of any plan, whatever its figures."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.api import plan_captured
from autopar.api.repricing import repriced
from autopar.capture import Captured
from autopar.errors import InfeasibleError, UsageError
from autopar.ir.plan import Plan
from autopar.options import PlanOptions
from autopar.progress import Silent
from benchmarks.architectures import build
from cost_models.cluster import ClusterSpec
from tests.api.test_relations import World
from tests.support.remembering import remembered

VERSION = torch.__version__.partition("+")[0]
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(80) if seed != 1)]

WISHES: list[dict[str, Any]] = [
    {"tp": 2}, {"pp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2}, {"microbatch": 1}, {"microbatch": 2},
    {"recompute": "full"}, {"recompute": "selective"}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"interleave": 2},
    {"schedule": "gpipe"}, {"schedule": "zb_h1"},
]  # fmt: skip


def drawn_model(draw: random.Random) -> Captured:
    """Return a random model's program of a batch up to four times as large as its example."""
    model, inputs = build(f"random:{draw.randrange(400)}")
    times = draw.choice([1, 1, 2, 3, 4])
    return remembered(model, {name: torch.cat([value] * times) for name, value in inputs.items()})


def drawn_cluster(draw: random.Random, program: Captured) -> ClusterSpec:
    """Return hosts of one kind, or of two, whose devices may hold a third of the program or all of it."""
    graph = program.graph
    made = sum(op.outputs[0].nbytes for op in graph.ops if op.phase == "forward" and op.outputs and op.outputs[0])
    parameters = sum(op.outputs[0].nbytes for op in graph.ops if op.kind == "parameter" and op.outputs[0])
    held_mib = (4 * parameters + made) / 2**20
    world = World(
        hosts=draw.choice([1, 1, 2, 3]),
        devices=draw.choice([1, 2, 2, 3, 4]),
        tflops=10 ** draw.uniform(-4, 1),
        memory_mib=max(1, int(held_mib * draw.choice([0.3, 0.6, 1, 2, 100]))),
        links_gbytes=10 ** draw.uniform(-1.5, 2),
        adapter_gbits=10 ** draw.uniform(-1.5, 2),
        latency_us=10 ** draw.uniform(0, 2.5),
    )
    if draw.random() < 0.7:
        return world.spec()
    other = replace(world, devices=draw.choice([1, 2, world.devices]), tflops=world.tflops * draw.choice([0.3, 1, 2]))
    return world.spec((world, draw.choice([1, 2])), (other, 1))


def planned(program: Captured, cluster: ClusterSpec, **options: Any) -> Plan | str:
    """Return the plan, or why what is wished for cannot be."""
    try:
        return plan_captured(program, "Random", cluster, PlanOptions.parse(time_limit=30.0, **options), Silent())
    except (InfeasibleError, UsageError) as error:
        return str(error)


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_keep_to_memory_and_wishes_and_are_proven_saved_and_priced_as_they_are(seed: int, tmp_path: Path):
    draw = random.Random(seed)
    program = drawn_model(draw)
    cluster = drawn_cluster(draw, program)
    margin, wish = draw.choice([0.0, 0.1]), draw.choice(WISHES) if draw.random() < 0.4 else {}
    optimizer = draw.choice(["adamw", "sgd", "none"])

    plan = planned(program, cluster, memory_margin=margin, optimizer=optimizer, fix=wish)

    if isinstance(plan, str):
        assert re.search(r"\d", plan), "a refusal names what does not go together, with its numbers"
        return
    found = plan.estimates
    for stage in found.per_stage:
        assert stage.peak_memory_bytes <= (stage.memory_budget_bytes or found.memory_budget_bytes)
    assert plan.solver.bound <= plan.solver.objective == pytest.approx(found.step_time_s, rel=1e-12)
    parts = found.breakdown
    spent = [parts.compute_s, parts.exposed_communication_s, parts.bubble_s, parts.optimizer_s, parts.host_s]
    assert sum(spent) == pytest.approx(found.step_time_s, rel=1e-6)
    assert min(spent) > -1e-12
    degrees = plan.decisions.degrees
    assert all(degrees[key] == size for key, size in wish.items() if key in degrees)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.decisions == plan.decisions
    again = repriced(loaded, program.graph, cluster, VERSION).estimates
    assert again.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)
    assert again.peak_memory_bytes == found.peak_memory_bytes
    other = draw.choice(WISHES)
    asked = planned(program, cluster, memory_margin=margin, optimizer=optimizer, fix={**other, **wish})
    if isinstance(asked, Plan):
        assert plan.solver.bound <= asked.estimates.step_time_s * (1 + 1e-9), other
