"""What travels together is priced so: small gradients pay the latency of a few calls, not one each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.api.solving import Solving
from autopar.ir.plan import Plan
from cost_models.cluster import ClusterSpec

DEEP = 24


class Deep(nn.Module):
    """Many small parameters: a scale and a bias for each narrow layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(DEEP))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Squared(nn.Module):
    """A loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def planned(**options: object) -> Plan:
    fix = {"dp_replicate": 8}
    return autopar.plan(Deep(), "h100-sxm-80gb:8", example_inputs=(torch.ones(4096, 64),), fix=fix, **options)


def exposed_s(plan: Plan) -> float:
    return plan.estimates.breakdown.exposed_communication_s


def test_hardly_more_is_exposed_than_what_all_collectives_take():
    plan = planned()

    taken_s = sum(each.predicted_s for each in plan.decisions.collectives)
    assert len(plan.decisions.collectives) < DEEP
    assert 0 < exposed_s(plan) < 1.2 * taken_s  # copies on the device are counted as exposed, too


def test_without_overlap_each_gradient_pays_for_its_call():
    together, alone = planned(), planned(overlap=False)

    assert exposed_s(alone) > 4 * exposed_s(together)
    assert together.estimates.step_time_s < alone.estimates.step_time_s


@pytest.mark.parametrize("fix", [{"dp_replicate": 8}, {"dp_shard": 8}, {"dp_shard": 8, "zero": 3}])
def test_no_plan_is_faster_than_the_bound_of_the_search(fix: dict[str, int]):
    plan = autopar.plan(Deep(), "h100-sxm-80gb:8", example_inputs=(torch.ones(4096, 64),), fix=fix)

    assert plan.solver.bound <= plan.estimates.step_time_s
    assert plan.solver.objective == pytest.approx(plan.estimates.step_time_s)


def test_layouts_priced_call_by_call_are_taken_where_the_shared_ones_take_longer_than_the_table_says(
    monkeypatch: pytest.MonkeyPatch,
):
    net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)), Squared())
    nic = {"bandwidth": "200Mbit/s", "latency": "1ms"}
    spec = {
        "version": 1,
        "name": "hosts",
        "nodes": {"host": {"device": "cpu", "count": 1, "nic": nic}},
        "groups": [{"node": "host", "count": 4}],
    }

    def found() -> Plan:
        return autopar.plan(
            net, ClusterSpec.from_dict(spec), example_inputs=(torch.ones(32, 256),), fix={"dp_replicate": 4}
        )

    better = found()
    monkeypatch.setattr(Solving, "_called_singly", lambda self, found, *rest: found)
    shared = found()

    assert better.estimates.step_time_s < 0.9 * shared.estimates.step_time_s
    assert better.solver.bound == pytest.approx(shared.solver.bound)


class Convolutions(nn.Module):
    """Gradients of weights that are made beside those of inputs, and cast where the program is in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(512, 512, 3, padding=1, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize("role", ["dp_replicate", "dp_shard"])
def test_gradients_that_are_waited_for_where_they_are_cast_may_all_travel_together(role: str):
    node = {"device": "a10g", "count": 1, "nic": {"bandwidth": "10Gbit/s", "latency": "25us"}}
    groups = [{"node": "slow", "count": 4}]
    slow = ClusterSpec.from_dict({"version": 1, "name": "ethernet", "nodes": {"slow": node}, "groups": groups})

    made = autopar.plan(
        Convolutions(), slow, example_inputs=(torch.ones(64, 512, 8, 8),), fix={role: 4}, precision="bf16"
    )

    taken_s = sum(each.count * each.predicted_s for each in made.decisions.collectives)
    assert exposed_s(made) < 1.05 * taken_s
