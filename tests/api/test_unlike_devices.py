"""Plans on clusters of unlike devices, and their steps on gloo ranks against the model's own."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError
from autopar.ir.plan_json import from_json, to_json
from autopar.report.explain import explain
from autopar.report.table import table_text
from cost_models.cluster import ClusterSpec
from tests.support.ranks import RankPool
from tests.support.training import Trained, train

WIDTH = 64
Groups = list[tuple[str, int]]


def cluster(groups: Groups, per_node: int = 1, **memory: str) -> ClusterSpec:
    """Return hosts of cores that are `fast`, or `slow` at a quarter of the rate; memory by kind."""
    device = {"preset": "cpu", "multiprocessors": 0}
    held = {kind: {"capacity": memory.get(kind, "4 GiB"), "reserved": "0 B"} for kind in ("fast", "slow")}
    links = {"links": {"bandwidth": "10 GB/s", "latency": "1us"}} if per_node > 1 else {}
    host = {"count": per_node, "nic": {"bandwidth": "10 GB/s", "latency": "1us"}, **links}
    return ClusterSpec.from_dict({
        "version": 1,
        "name": "unlike",
        "devices": {
            "fast": {**device, "memory": {**held["fast"], "bandwidth": "36 GB/s"}, "compute": {"fp32": "96 GFLOP/s"}},
            "slow": {
                **device, "kernel_launch": "20us",
                "memory": {**held["slow"], "bandwidth": "9 GB/s"}, "compute": {"fp32": "24 GFLOP/s"},
            },
        },
        "nodes": {kind: {**host, "device": kind} for kind in ("fast", "slow")},
        "groups": [{"node": node, "count": count} for node, count in groups],
    })  # fmt: skip


class Blocks(nn.Module):
    """Residual blocks of given hidden widths."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, WIDTH)) for width in widths
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def blocks(*widths: int, rows: int = 64) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Blocks(widths), (torch.randn(rows, WIDTH),)


EVEN = (512,) * 10
ROWS = 256


def planned(spec: ClusterSpec, *widths: int, rows: int = ROWS, **fix: Any) -> autopar.Plan:
    model, batch = blocks(*widths, rows=rows)
    return autopar.plan(model, spec, example_inputs=batch, fix=fix)


def layers_of(plan: autopar.Plan) -> dict[str, int]:
    """Return how many blocks the stages on each kind of devices have."""
    found: dict[str, int] = {}
    for stage, each in zip(plan.decisions.stages, plan.estimates.per_stage, strict=True):
        found[each.devices] = found.get(each.devices, 0) + len(stage.blocks)
    return found


def test_without_stages_a_step_takes_what_it_takes_on_the_slowest_devices_alone():
    mixed, slow, fast = (
        planned(cluster(groups), *EVEN, dp_replicate=2)
        for groups in ([("fast", 1), ("slow", 1)], [("slow", 2)], [("fast", 2)])
    )

    assert mixed.estimates.step_time_s == pytest.approx(slow.estimates.step_time_s, rel=1e-6)
    assert slow.estimates.step_time_s > 2 * fast.estimates.step_time_s
    # Of the peak of all devices, not of the slowest.
    assert mixed.estimates.mfu == pytest.approx(slow.estimates.mfu * 24 / ((24 + 96) / 2), rel=1e-6)
    assert mixed.estimates.memory_budget_bytes == slow.estimates.memory_budget_bytes
    (warned,) = [each for each in mixed.warnings if each.code == "unlike-devices"]
    assert warned.text.startswith(
        "1 x fast, 1 x slow work in step: all go at the pace of the slowest (24 GFLOP/s of up to 96 GFLOP/s in float32)"
    )
    assert warned.location == "ranks 0 to 1"
    assert not [each for each in (*slow.warnings, *fast.warnings) if each.code == "unlike-devices"]


def test_stages_of_one_kind_of_device_each_wait_for_no_other():
    plan = planned(cluster([("fast", 1), ("slow", 1)], per_node=2), *EVEN, pp=2, tp=2, microbatch=32)

    assert not plan.warnings
    assert sorted(layers_of(plan)) == ["2 x fast", "2 x slow"]


@pytest.mark.parametrize("groups", [[("fast", 1), ("slow", 1)], [("slow", 1), ("fast", 1)]], ids=str)
def test_faster_devices_take_more_layers_wherever_their_ranks_are(groups: Groups):
    plan = planned(cluster(groups), *EVEN, pp=2, microbatch=16)

    found = layers_of(plan)
    assert found["1 x fast"] == 8  # four fifths of the work
    assert found["1 x slow"] == 2
    even = planned(cluster([("slow", 2)]), *EVEN, pp=2, microbatch=16)
    assert plan.estimates.step_time_s < even.estimates.step_time_s / 2
    assert from_json(to_json(plan)) == plan
    # More than the arithmetic at the peaks of all devices, to which MFU refers.
    assert 1.1 * plan.estimates.mfu * plan.estimates.step_time_s < plan.solver.bound <= plan.estimates.step_time_s


@cache
def free_plan(memory: str) -> tuple[ClusterSpec, autopar.Plan]:
    """Return hosts of both kinds with so much memory, and the plan of all wishes open, which takes as long as ten."""
    spec = cluster([("fast", 2), ("slow", 2)], fast=memory, slow=memory)
    return spec, planned(spec, *EVEN)


@pytest.mark.parametrize(
    ("memory", "microbatch"),
    [
        ("4 GiB", 4),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("4 GiB", 32), ("6 MiB", 4), ("6 MiB", 32)]),
    ],
)
def test_no_plan_on_unlike_devices_beats_what_is_proven_of_all(memory: str, microbatch: int):
    spec, free = free_plan(memory)

    for pp in (2, 4):
        for recompute in ("none", "full"):
            with suppress(InfeasibleError):
                found = planned(spec, *EVEN, pp=pp, microbatch=microbatch, recompute=recompute)
                assert max(free.solver.bound, found.solver.bound) <= found.estimates.step_time_s * (1 + 1e-9)


def test_what_is_proven_on_unlike_devices_knows_what_operators_take_on_each():
    """The products alone, at the peaks of all devices, take two thirds of it."""
    assert planned(cluster([("fast", 2), ("slow", 2)]), *EVEN, rows=8192).solver.gap < 0.2


@pytest.mark.parametrize("microbatch", [8, 32])
def test_what_is_proven_on_unlike_devices_knows_how_pipelines_fill_and_hand_over(microbatch: int):
    """Work that all ranks share, and one micro-batch's way through all blocks, are a quarter to a third of it."""
    found = planned(cluster([("fast", 2), ("slow", 2)]), *EVEN, pp=4, microbatch=microbatch)

    assert 0.6 * found.estimates.step_time_s < found.solver.bound <= found.estimates.step_time_s


def test_devices_with_little_memory_take_fewer_layers_and_keep_to_it():
    ample = planned(cluster([("fast", 1), ("slow", 1)]), *EVEN, pp=2, microbatch=16)
    most = max(each.peak_memory_bytes for each in ample.estimates.per_stage if each.devices == "1 x fast")
    scarce = cluster([("fast", 1), ("slow", 1)], fast=f"{most * 2 // 3} B")

    plan = planned(scarce, *EVEN, pp=2, microbatch=16)

    assert 0 < layers_of(plan)["1 x fast"] < layers_of(ample)["1 x fast"]
    for each in plan.estimates.per_stage:
        assert each.peak_memory_bytes <= each.memory_budget_bytes
    budgets = {each.devices: each.memory_budget_bytes for each in plan.estimates.per_stage}
    assert budgets["1 x fast"] < most < budgets["1 x slow"]


def test_stages_that_fit_on_no_devices_say_what_is_missing():
    spec = cluster([("fast", 1), ("slow", 1)], fast="1 MiB", slow="2 MiB")

    with pytest.raises(InfeasibleError, match=r"pipeline ranks needs .* and has 1\.\d+ MiB|does not fit"):
        planned(spec, *EVEN, pp=2, microbatch=16)


def test_hosts_with_unlike_numbers_of_cores_are_planned_for():
    spec = ClusterSpec.from_dict({
        **cluster([("fast", 1), ("slow", 2)]).to_dict(),
        "nodes": {
            "small": {"device": "fast", "count": 2, "links": {"bandwidth": "10 GB/s", "latency": "1us"},
                      "nic": {"bandwidth": "10 GB/s", "latency": "1us"}},
            "single": {"device": "slow", "count": 1, "nic": {"bandwidth": "10 GB/s", "latency": "1us"}},
        },
        "groups": [{"node": "small", "count": 1}, {"node": "single", "count": 2}],
    })  # fmt: skip

    plan = planned(spec, *EVEN, pp=2, microbatch=16)

    assert layers_of(plan) == {"2 x fast": 9, "2 x slow": 1}
    assert plan.cluster == spec.to_dict()


def test_reports_name_the_devices_of_each_stage():
    plan = planned(cluster([("slow", 1), ("fast", 1)]), 2048, 256, pp=2, microbatch=16)

    table, told = table_text(plan), explain(plan)

    assert [stage.ranks for stage in plan.decisions.stages] == [(1,), (0,)]
    assert "devices" in table
    assert "1 x fast" in table
    assert "  stage 0: 1 x fast, ranks 1 to 1; busy " in told
    assert "roofline of 1 x fast; 1 x slow" in told


def run(_rank: int, groups: Groups, per_node: int, widths: tuple[int, ...], fix: dict[str, Any]) -> Trained:
    return train(*blocks(*widths), cluster(groups, per_node), fix)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_steps_of_two_stages_in_the_order_of_their_devices_equal_the_models_own(pool: RankPool, schedule: str):
    groups, widths = [("slow", 1), ("fast", 1)], (1024, 128)
    fix = {"pp": 2, "microbatch": 16, "schedule": schedule}
    plan = planned(cluster(groups), *widths, rows=64, **fix)
    assert [stage.ranks for stage in plan.decisions.stages] == [(1,), (0,)]

    first, second = pool.values(run, groups, 1, widths, fix)

    require_the_models_own([first, second])
    assert {name.split(".")[1] for name in first.held} == {"1"}
    assert {name.split(".")[1] for name in second.held} == {"0"}


@pytest.mark.parametrize(
    ("per_node", "groups", "widths", "fix", "ranks"),
    [
        (
            1, [("slow", 1), ("fast", 1), ("slow", 1), ("fast", 1)], (1024, 128, 1024, 128), {"pp": 4},
            [(1,), (0,), (3,), (2,)],
        ),
        (2, [("slow", 1), ("fast", 1)], (8192, 128), {"pp": 2, "tp": 2}, [(2, 3), (0, 1)]),
        (2, [("slow", 1), ("fast", 1)], (1024, 128), {"pp": 2, "dp_shard": 2}, [(2, 3), (0, 1)]),
    ],
    ids=["four stages", "tensor parallel", "sharded"],
)  # fmt: skip
def test_steps_of_permuted_stages_equal_the_models_own(
    four: RankPool,
    per_node: int,
    groups: Groups,
    widths: tuple[int, ...],
    fix: dict[str, Any],
    ranks: list[tuple[int, ...]],
):
    fix = {**fix, "microbatch": 16, "schedule": "1f1b"}
    plan = planned(cluster(groups, per_node), *widths, rows=64, **fix)
    assert [stage.ranks for stage in plan.decisions.stages] == ranks

    require_the_models_own(four.values(run, groups, per_node, widths, fix))


def require_the_models_own(done: list[Trained]) -> None:
    assert all(each.losses == done[0].losses for each in done)
    assert max(each.worst_gradient for each in done) < 1e-4
