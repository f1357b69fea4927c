"""Relations between plans that hold whatever the figures are: better hardware, more of it, and wishes that are met."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import nn

from autopar.api import plan_captured
from autopar.capture import Captured
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.options import PlanOptions
from autopar.progress import Silent
from cost_models.cluster import ClusterSpec
from tests.support.remembering import remembered

_TOLERANCE = 1.03
"""Ratio of two predicted steps: the gap that searches stop at, and what a plan with fewer parts may lose."""


class Layers(nn.Module):
    """Residual blocks with more parameters than activations, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(2)
        )
        self.head = nn.Linear(256, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


@cache
def captured(batch: int) -> Captured:
    """Return the program of a batch."""
    return remembered(Layers(), (torch.randn(batch, 64, 256),))


@dataclass(frozen=True)
class World:
    """A cluster of equal hosts."""

    hosts: int = 2
    devices: int = 2
    tflops: float = 9.0
    memory_mib: int = 4096
    links_gbytes: float = 20.0
    adapter_gbits: float = 10.0
    latency_us: float = 20.0

    def spec(self, *groups: tuple[World, int]) -> ClusterSpec:
        """Return the cluster, of several groups of hosts if they are given."""
        parts = groups or ((self, self.hosts),)
        devices = {f"gpu{place}": world._device() for place, (world, _) in enumerate(parts)}
        nodes = {f"host{place}": world._node(f"gpu{place}") for place, (world, _) in enumerate(parts)}
        return ClusterSpec.from_dict({
            "version": 1,
            "name": "world",
            "devices": devices,
            "nodes": nodes,
            "groups": [{"node": f"host{place}", "count": count} for place, (_, count) in enumerate(parts)],
        })  # fmt: skip

    def _device(self) -> dict[str, object]:
        return {
            "preset": "a100-sxm-40gb",
            "memory": {"capacity": f"{self.memory_mib} MiB", "reserved": "0 B"},
            "compute": {"float32": f"{self.tflops} TFLOP/s", "tf32": f"{self.tflops} TFLOP/s"},
        }

    def _node(self, device: str) -> dict[str, object]:
        inside = {"bandwidth": f"{self.links_gbytes} GB/s", "latency": f"{self.latency_us} us", "topology": "switch"}
        across = {"bandwidth": f"{self.adapter_gbits} Gbit/s", "latency": f"{self.latency_us} us"}
        return {"device": device, "count": self.devices, "links": inside, "nic": across}


@cache
def planned(world: World, batch: int = 32, fix: tuple[tuple[str, object], ...] = ()) -> Plan:
    options = PlanOptions.parse(memory_margin=0.0, fix=dict(fix), time_limit=600.0)
    return plan_captured(captured(batch), "Layers", world.spec(), options, Silent())


def step_s(world: World, batch: int = 32, **fix: object) -> float:
    return planned(world, batch, tuple(fix.items())).estimates.step_time_s


SLOW = World(adapter_gbits=1.0)
SMALL = World(memory_mib=32)
BUSY = World(tflops=0.2)


@pytest.mark.parametrize(
    ("world", "better"),
    [
        pytest.param(SMALL, {"adapter_gbits": 40.0}, id="adapter", marks=pytest.mark.slow),
        pytest.param(SMALL, {"links_gbytes": 80.0}, id="links", marks=pytest.mark.slow),
        pytest.param(SMALL, {"latency_us": 5.0}, id="latency", marks=pytest.mark.slow),
        pytest.param(SMALL, {"memory_mib": 8192}, id="memory", marks=pytest.mark.slow),
        pytest.param(SMALL, {"tflops": 18.0}, id="compute", marks=pytest.mark.slow),
        pytest.param(BUSY, {"tflops": 0.4}, id="compute with enough memory"),
        pytest.param(SLOW, {"adapter_gbits": 4.0}, id="adapter with enough memory"),
    ],
)
def test_better_hardware_is_never_slower(world: World, better: dict[str, float]):
    assert step_s(replace(world, **better)) <= _TOLERANCE * step_s(world)


def test_more_hosts_are_never_slower_and_larger_batches_never_a_sample():
    once = step_s(BUSY)

    assert step_s(replace(BUSY, hosts=2 * BUSY.hosts)) <= _TOLERANCE * once
    assert step_s(BUSY, 64) <= _TOLERANCE * 2 * once


FIXED: list[dict[str, object]] = [
    {"pp": 2}, {"dp_shard": 4}, {"recompute": "full"}, {"tp": 2}, {"dp_replicate": 4}, {"microbatch": 2}
]  # fmt: skip


@pytest.mark.parametrize(
    "fixed", [pytest.param(FIXED[:2], id="some"), pytest.param(FIXED, id="all", marks=pytest.mark.slow)]
)
def test_nothing_that_is_fixed_beats_the_free_plan_or_its_bound(fixed: list[dict[str, object]]):
    free = planned(SMALL)
    seen = 0
    for fix in fixed:
        try:
            found = step_s(SMALL, **fix)
        except InfeasibleError:
            continue
        seen += 1

        assert free.estimates.step_time_s <= _TOLERANCE * found, fix
        assert free.solver.bound <= found * (1 + 1e-9), fix
    assert seen >= len(fixed) / 2


def test_what_the_free_plan_chose_can_be_asked_for():
    free = planned(SMALL)
    own = {axis: size for axis, size in free.decisions.degrees.items() if size > 1}

    asked = step_s(SMALL, microbatch=free.workload.microbatch, **own)

    assert own
    assert asked <= _TOLERANCE * free.estimates.step_time_s


def test_ranks_that_only_repeat_work_are_named():
    repeated, split = planned(SLOW), planned(BUSY)

    assert [each.code for each in repeated.warnings] == ["repeated-work"]
    assert "the ranks of dp_replicate=4 repeat one another's work" in repeated.warnings[0].text
    assert repeated.workload.microbatch == 32
    assert not split.warnings
    assert split.workload.microbatch * split.workload.num_microbatches < 32


def test_the_order_of_unlike_hosts_does_not_matter():
    fast, slow = World(tflops=18.0), World(memory_mib=2048)

    one, other = (
        plan_captured(captured(32), "Layers", spec, PlanOptions.parse(time_limit=600.0), Silent()).estimates.step_time_s
        for spec in (fast.spec((fast, 1), (slow, 1)), fast.spec((slow, 1), (fast, 1)))
    )

    assert other == pytest.approx(one, rel=_TOLERANCE - 1)
