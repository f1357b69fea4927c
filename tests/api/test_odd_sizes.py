"""Batches and clusters whose numbers do not go well together are planned, or refused by name."""

from __future__ import annotations

import pytest

from autopar import api
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.strategies import axis_strategies
from autopar.strategies.compose import AxisSpec, compose


def planned(model: str, cluster: str, batch: int, **fix: int) -> Plan:
    options = PlanOptions.parse(batch=batch, fix=fix, time_limit=20)
    return api.plan_reference(model, cluster, options, Silent())


@pytest.mark.parametrize("fix", [{}, {"pp": 2}, {"tp": 2}], ids=str)
def test_one_sample_is_planned_on_several_devices(fix: dict[str, int]):
    plan = planned("zoo:llama-tiny", "cpu:2", 1, **fix)

    assert plan.workload.num_microbatches == plan.workload.microbatch == 1
    assert all(plan.decisions.degrees[key] == degree for key, degree in fix.items())


def test_a_batch_that_divides_by_each_axis_and_not_by_both_is_planned_otherwise():
    plan = planned("zoo:mlp", "l4:6x3", 24, pp=1)

    (idle,) = (each for each in plan.decisions.mesh.axes if each.name == "dp_replicate")
    assert 24 % idle.size
    (warning,) = plan.warnings
    assert warning.code == "indivisible-batch"
    assert f"the batch of 24 does not divide by dp_replicate={idle.size}, whose ranks repeat" in warning.text
    assert plan.workload.microbatch == 24


def test_parameters_are_sharded_over_more_devices_than_there_are_samples():
    plan = planned("zoo:mlp", "l4:8x2", 3, zero=3)

    assert plan.decisions.degrees["dp_shard"] * plan.decisions.degrees["tp"] > 1


def test_axes_that_an_operator_divides_by_one_at_a_time_only_are_named():
    graph = api.program_of(*_mlp(24), "fp32")
    axes = (AxisSpec(3, "batch"), AxisSpec(6, "batch"))

    with pytest.raises(InfeasibleError) as caught:
        compose(graph, axes, axis_strategies)

    assert "does not divide by all axes of the mesh (3 x 6) together; take a batch that is a multiple" in str(
        caught.value
    )


def _mlp(batch: int) -> tuple[object, tuple[()], object]:
    from autopar.models import resolve

    found = resolve("zoo:mlp", batch=batch, overrides={"hidden": "64"})
    return found.model, (), found.example_inputs
