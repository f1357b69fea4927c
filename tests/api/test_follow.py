"""The evaluation program is planned around parameters that already are where the training plan has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.api import plan_captured
from autopar.api.planning import Planner, Program
from autopar.capture import Captured
from autopar.ir.placement import Replicate, Shard
from autopar.ir.plan import Plan
from autopar.options import PlanOptions
from autopar.progress import Silent
from cost_models.cluster import ClusterSpec
from tests.support.remembering import remembered

CLUSTER = ClusterSpec.parse("cpu:4")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def planned(**options: object) -> tuple[Plan, Captured]:
    """Return a plan for training, and the program for evaluation."""
    model, example = Net(), (torch.randn(8, 16),)
    plan = plan_captured(remembered(model, example), "Net", CLUSTER, PlanOptions.parse(**options), Silent())
    return plan, remembered(model, example, training=False, with_backward=False)


@pytest.mark.parametrize(
    "options",
    [
        {"fix": {"tp": 4}},
        {"fix": {"dp_shard": 4, "zero": 3}},
        {"fix": {"dp_replicate": 2, "tp": 2}},
        {"fix": {"dp_shard": 2}},
        {"constraint": ("up.weight=Shard(1)@tp",)},
    ],
    ids=str,
)
def test_parameters_stay_where_they_are(options: dict[str, object]):
    plan, program = planned(**options)
    options = PlanOptions(optimizer="none", memory_margin=0.0)

    found = Planner(Program(program.graph, "Net", "2.13.0"), CLUSTER, options, Silent()).follow(plan.decisions)

    assert {name: each.placements for name, each in found.parameters.items()} == {
        name: each.placements for name, each in plan.decisions.parameters.items()
    }
    assert found.mesh == plan.decisions.mesh


def test_a_data_parallel_axis_keeps_a_parameter_in_any_dimension():
    plan, program = planned(fix={"dp_shard": 4, "zero": 3})
    odd = {
        name: type(each)(placements=(Shard(1),) if name.endswith("weight") else (Replicate(),), gather="per_phase")
        for name, each in plan.decisions.parameters.items()
    }
    moved = type(plan.decisions)(**{**_fields(plan.decisions), "parameters": odd})
    options = PlanOptions(optimizer="none", memory_margin=0.0)

    found = Planner(Program(program.graph, "Net", "2.13.0"), CLUSTER, options, Silent()).follow(moved)

    assert found.parameters["up.weight"].placements == (Shard(1),)
    linear = next(each for each in found.operators.values() if each.target == "aten.addmm.default")
    assert Shard(0) in {layout[0] for layout in linear.strategy.inputs}


def _fields(decisions: object) -> dict[str, object]:
    return {name: getattr(decisions, name) for name in decisions.__dataclass_fields__}
