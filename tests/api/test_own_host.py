"""What the host adds to steps of our own programs on GPUs: where it is the slower one, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import autopar
from autopar.api import program_of
from autopar.api.estimating import Estimates
from autopar.api.repricing import repriced
from autopar.api.solving import Solving
from autopar.api.wishes import read_wishes
from autopar.api.works import Works
from autopar.ir.plan import Plan
from autopar.options import PlanOptions
from autopar.report.explain import explain
from autopar.report.table import table_text
from autopar.search.meshes import MeshAxis
from autopar.search.trials import Trial
from cost_models.cluster import ClusterSpec
from cost_models.device import catalogued_device, host_of

H100 = ClusterSpec.parse("h100-sxm-80gb:2")
LAUNCH_S = catalogued_device("h100-sxm-80gb").kernel_launch_s
DEVICE = {"preset": "h100-sxm-80gb"}
CLUSTER = {
    "version": 1,
    "name": "two",
    "nodes": {
        "host": {
            "device": "gpu",
            "count": 2,
            "links": {"bandwidth": "450 GB/s", "latency": "5us", "topology": "switch"},
        }
    },
    "groups": [{"node": "host", "count": 1}],
}


class Model(nn.Module):
    """Feed-forward layers, and a loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        one = [nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(layers)]
        self.layers = nn.ModuleList(one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def planned(samples: int, fix: Mapping[str, int | str], layers: int = 4, launch: str = "") -> Plan:
    with torch.device("meta"):
        model, x = Model(layers), torch.empty(samples, 512)
    device = DEVICE | ({"kernel_launch": launch} if launch else {})
    cluster = {**CLUSTER, "devices": {"gpu": device}}
    return autopar.plan(model, cluster, example_inputs=(x,), fix=fix)


def adds_up(plan: Plan) -> bool:
    parts = plan.estimates.breakdown
    whole = parts.compute_s + parts.exposed_communication_s + parts.bubble_s + parts.optimizer_s + parts.host_s
    return whole == pytest.approx(plan.estimates.step_time_s)


@pytest.mark.parametrize("fix", [{"dp_replicate": 2}, {"pp": 2, "microbatch": 8}], ids=str)
def test_few_samples_take_what_the_host_takes(fix: Mapping[str, int]):
    few, many = (
        planned(samples, fix | ({"microbatch": samples // 2} if "pp" in fix else {})) for samples in (16, 1 << 17)
    )

    assert few.estimates.breakdown.host_s > 0.1 * few.estimates.step_time_s
    assert many.estimates.breakdown.host_s < 0.02 * many.estimates.step_time_s
    assert adds_up(few)
    assert adds_up(many)


def test_the_host_takes_so_much_for_each_operator_and_micro_batch():
    one, four = planned(64, {"dp_replicate": 2}), planned(64, {"dp_replicate": 2, "microbatch": 8})
    deep = planned(64, {"dp_replicate": 2}, layers=8)
    host_s = [each.estimates.step_time_s - each.estimates.breakdown.optimizer_s for each in (one, four, deep)]
    count = round(host_s[0] / host_of("gpu", LAUNCH_S))

    assert host_s[0] == pytest.approx(count * host_of("gpu", LAUNCH_S))
    assert host_s[1] == pytest.approx(4 * host_s[0])
    assert 1.8 < host_s[2] / host_s[0] < 2.0


def test_a_plan_says_that_devices_wait_for_hosts_and_how_long():
    few, many = planned(16, {}), planned(1 << 17, {})
    (warning,) = [each for each in few.warnings if each.code == "host-bound"]

    assert "each in about 14.9 us" in warning.text
    assert "more samples a micro-batch" in warning.text
    assert few.solver.gap < 0.5
    assert "waiting for the host" in table_text(few)
    assert "+ waiting for the host" in explain(few)
    assert not [each for each in many.warnings if each.code == "host-bound"]
    assert "waiting for the host" not in table_text(many)


def test_a_slower_host_is_told_of_by_its_launches():
    usual, slow = planned(16, {"dp_replicate": 2}), planned(16, {"dp_replicate": 2}, launch="9us")
    waits = [each.estimates.breakdown.host_s + each.estimates.breakdown.compute_s for each in (usual, slow)]

    assert waits[1] == pytest.approx(waits[0] * 9e-6 / LAUNCH_S, rel=0.25)


def test_a_cpu_issues_what_it_computes():
    assert host_of("cpu", 1e-5) == catalogued_device("cpu").host_s == 0.0


def test_hosts_bound_trials_and_no_plan_beats_them():
    with torch.device("meta"):
        graph = program_of(Model(4), (), (torch.empty(64, 512),), "fp32")
    solving = Solving(graph, H100, PlanOptions.parse())
    found = Estimates(Works(solving, read_wishes(solving.options)), False, lambda: 60.0)
    for count in (1, 4, 8):
        plain = Trial((MeshAxis("microbatch", count), MeshAxis("dp_replicate", 2)))
        staged = Trial((MeshAxis("microbatch", count),), 2)
        steps = [
            planned(64, fix | {"microbatch": 64 // (count * fix.get("dp_replicate", 1))}).estimates.step_time_s
            for fix in ({"dp_replicate": 2}, {"pp": 2})
        ]
        found.of([plain, staged], fits=True)
        bounds = [found.bound_s(trial) for trial in (plain, staged)]

        assert bounds == [solving.issued_s(plain), solving.issued_s(staged)]
        assert all(0.3 * step < bound <= step for step, bound in zip(steps, bounds, strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_one_micro_batch_in_stages_takes_what_is_issued_in_turn(schedule: str):
    """Weights' gradients of a stage are issued while the stage before goes on; with one device all is in turn."""
    with torch.device("meta"):
        graph = program_of(Model(4), (), (torch.empty(16, 512),), "fp32")
    solving = Solving(graph, H100, PlanOptions.parse())
    alone = Solving(graph, ClusterSpec.parse("h100-sxm-80gb:1"), PlanOptions.parse())
    plan = planned(16, {"pp": 2, "microbatch": 16, "schedule": schedule})

    bound = solving.issued_s(Trial((), 2))
    assert bound == solving.least_issued_s < alone.least_issued_s == solving.issued_s(Trial(()))
    assert bound <= plan.estimates.step_time_s
    assert plan.solver.bound <= plan.estimates.step_time_s
    assert plan.solver.gap > 0.0


def test_a_plan_that_is_priced_for_another_cluster_is_bound_by_its_hosts():
    with torch.device("meta"):
        graph = program_of(Model(4), (), (torch.empty(16, 512),), "fp32")
    plan = planned(16, {"dp_replicate": 2})

    again = repriced(plan, graph, ClusterSpec.parse("a100-sxm-80gb:2"), plan.fingerprint.torch)

    assert 0.3 < again.solver.bound / again.estimates.step_time_s <= 1.0
