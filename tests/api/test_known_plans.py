"""Plans that experts would write, found by the free search."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.ir.placement import Replicate, Shard
from autopar.ir.plan import Plan
from autopar.ir.plan_json import to_json

FAST_LINK = """
version: 1
name: fast-link
devices: {core: {preset: cpu}}
nodes: {host: {device: core, count: 1, nic: {bandwidth: 10Gbit/s, latency: 5us, call_overhead: 5us}}}
groups: [{node: host, count: 2}]
"""


class Mlp(nn.Module):
    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return functional.mse_loss(self.layers[-1](x), y)


def plan_mlp(cluster: str | Path, batch: int, width: int, depth: int = 2, **options: object) -> Plan:
    with torch.device("meta"):
        model, x = Mlp(width, depth), torch.empty(batch, width)
    return autopar.plan(model, cluster, example_inputs=(x, x), **options)


@pytest.fixture
def fast_link(tmp_path: Path) -> Path:
    path = tmp_path / "fast.yaml"
    path.write_text(FAST_LINK)
    return path


def moved(plan: Plan) -> list[tuple[str, int]]:
    return [(c.op, c.bytes) for c in plan.decisions.collectives for _ in range(c.count) if c.bytes > 64]


def test_a_narrow_mlp_with_a_large_batch_is_data_parallel(fast_link: Path) -> None:
    plan = plan_mlp(fast_link, batch=1024, width=128, optimizer="sgd")

    assert plan.decisions.degrees["dp_replicate"] == 2
    # By themselves or together: where a call costs more than a matrix's bytes, both travel in one.
    assert {op for op, _ in moved(plan)} == {"all_reduce"}
    assert sum(size for _, size in moved(plan)) == 2 * 128 * 128 * 4
    assert {c.phase for c in plan.decisions.collectives if c.bytes > 64} == {"backward"}


def test_a_wide_mlp_with_a_small_batch_is_tensor_parallel(fast_link: Path) -> None:
    plan = plan_mlp(fast_link, batch=128, width=1024, optimizer="sgd")

    activation = 128 * 1024 * 4
    assert plan.decisions.degrees["tp"] == 2
    # Summed, or scattered behind forward and gathered for backward: the same bytes.
    assert sorted(moved(plan)) in (
        [("all_reduce", activation)],
        [("all_gather", activation), ("reduce_scatter", activation)],
    )
    assert all(isinstance(p.placements[0], Shard) for p in plan.decisions.parameters.values())


def test_eight_billion_parameters_with_adamw_are_sharded_and_few_are_not() -> None:
    large = plan_mlp("h100-sxm-80gb:8", batch=65536, width=32768, depth=8, precision="bf16")
    small = plan_mlp("h100-sxm-80gb:8", batch=65536, width=256, depth=4, precision="bf16")

    assert sum(isinstance(p.placements[0], Shard) for p in large.decisions.parameters.values()) == 8
    assert large.estimates.peak_memory_bytes <= large.estimates.memory_budget_bytes
    assert {p.placements for p in small.decisions.parameters.values()} == {(Replicate(),)}


def test_a_wide_gpt_with_a_small_batch_gets_megatrons_splits() -> None:
    from autopar.models import resolve

    found = resolve("zoo:gpt2", batch=4, seq=512, overrides={"layers": "2", "hidden": "8192", "heads": "64"})
    plan = autopar.plan(
        found.model, "h100-sxm-80gb:4", example_inputs=found.example_inputs, precision="bf16", optimizer="sgd"
    )

    place = {name: decision.placements[-1] for name, decision in plan.decisions.parameters.items()}
    matrices = [name for name in place if name.endswith("weight") and "norm" not in name]
    assert plan.decisions.degrees["tp"] >= 4
    split = [name for name in matrices if isinstance(place[name], Shard)]
    assert len(split) >= len(matrices) - 1, place


def test_equal_requests_give_equal_bytes(fast_link: Path) -> None:
    first, second = (to_json(plan_mlp(fast_link, batch=128, width=256, seed=3)) for _ in range(2))

    assert first == second


def test_the_bound_is_below_the_objective_and_the_gap_is_theirs(fast_link: Path) -> None:
    solver = plan_mlp(fast_link, batch=256, width=512).solver

    assert solver.bound <= solver.objective
    assert solver.gap == pytest.approx((solver.objective - solver.bound) / solver.objective)
