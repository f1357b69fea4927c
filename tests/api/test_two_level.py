"""Collectives in two levels are chosen by price, stand in the plan, and are what the rewriter emits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.api import plan_captured
from autopar.api.staging import staged_program
from autopar.costs.links import Links, Message
from autopar.ir.plan import Plan
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.rewrite import rewrite
from autopar.rewrite.emitted import emitted
from cost_models.cluster import ClusterSpec
from cost_models.collectives import collective_s
from cost_models.topology import axis_hops
from tests.support.ranks import RankPool
from tests.support.remembering import remembered
from tests.support.training import Trained, train

TWO_BY_TWO = """
version: 1
name: two-by-two
devices: {core: {preset: cpu}}
nodes:
  host:
    device: core
    count: 2
    links: {preset: loopback-gloo}
    nic: {bandwidth: 1Gbit/s, latency: 100us}
groups: [{node: host, count: 2}]
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO_BY_TWO)
    return path


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return functional.mse_loss(self.layers[-1](x), y)


def plan_mlp(cluster: Path, **options: object) -> Plan:
    with torch.device("meta"):
        model, x = Mlp(1024), torch.empty(512, 1024)
    return autopar.plan(model, cluster, example_inputs=(x, x), optimizer="sgd", **options)


def test_large_gradients_are_reduced_in_two_levels_and_the_scalar_loss_is_not(cluster: Path):
    plan = plan_mlp(cluster, fix={"dp_replicate": 4})

    inner = {each.bytes > 1024: each.inner for each in plan.decisions.collectives}
    assert inner == {True: 2, False: 1}
    flat = plan_mlp(cluster, fix={"dp_replicate": 4}, two_level=False)
    assert {each.inner for each in flat.decisions.collectives} == {1}
    assert plan.estimates.step_time_s < flat.estimates.step_time_s


def test_a_group_within_a_node_is_flat(cluster: Path):
    plan = plan_mlp(cluster, fix={"dp_replicate": 2, "tp": 2})

    assert {each.inner for each in plan.decisions.collectives} == {1}


@pytest.mark.parametrize("fix", [{"dp_replicate": 4}, {"dp_shard": 4, "zero": 3}])
def test_what_is_emitted_is_what_the_plan_says(cluster: Path, fix: dict[str, object]):
    model, x = Mlp(1024), torch.randn(512, 1024)
    captured = remembered(model, (x, x))
    options = PlanOptions.parse(fix=fix, optimizer="sgd")

    plan = plan_captured(captured, "mlp", ClusterSpec.from_file(cluster), options, Silent())
    issued = rewrite(captured.joint, captured.graph, plan.decisions, rank=0).emitted

    priced = {(c.op, c.axis, c.bytes, c.inner) for c in plan.decisions.collectives}
    assert {(each.op, each.axis, each.bytes, each.inner) for each in issued} == priced
    assert any(each.inner == 2 for each in issued)


@pytest.mark.parametrize("fix", [{"dp_replicate": 4}, {"dp_shard": 4, "zero": 1}, {"dp_shard": 4, "zero": 3}], ids=str)
def test_programs_of_microbatches_have_collectives_in_two_levels_too(
    four: RankPool, cluster: Path, fix: dict[str, object]
):
    model, x = Mlp(1024), torch.randn(512, 1024)
    captured = remembered(model, (x, x))
    fix = {**fix, "microbatch": 64}
    options = PlanOptions.parse(fix=fix, optimizer="sgd")
    plan = plan_captured(captured, "mlp", ClusterSpec.from_file(cluster), options, Silent())
    programs = staged_program(captured, plan.decisions, 0, split=(), device="cpu").staged.stages[0]

    parts = (programs.begin, programs.forward, programs.backward, programs.finish)
    found = [each for part in parts if part is not None for each in emitted(part, set(plan.decisions.mesh.names))]
    priced = {(c.op, c.axis, c.bytes, c.inner) for c in plan.decisions.collectives}
    assert {(each.op, each.axis, each.bytes, each.inner) for each in found} <= priced
    assert any(each.inner == 2 for each in found)
    for done in four.values(train_mlp, str(cluster), fix):
        assert done.worst_gradient < 1e-4


def train_mlp(_rank: int, cluster: str, fix: dict[str, object]) -> Trained:
    torch.manual_seed(0)
    return train(Mlp(1024), (torch.randn(512, 1024), torch.randn(512, 1024)), cluster, fix)


@given(
    op=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    size=st.integers(1, 1 << 34),
    name=st.sampled_from(["cpu:2x2", "cpu:4x8", "h100-sxm-80gb:8x2", "h100-sxm-80gb:8x16", "a100-sxm-80gb:8x64"]),
)
def test_two_levels_are_chosen_where_they_are_cheaper_and_nowhere_else(op: str, size: int, name: str):
    spec = ClusterSpec.parse(name)
    links = Links(spec, (spec.device_count,), two_level=True)
    flat_s = collective_s(op, float(size), axis_hops(spec.levels, (spec.device_count,), 0))

    found_s, inner = links.message_s(Message(op, 0, size)), links.form(Message(op, 0, size))[0]
    assert found_s <= flat_s
    assert (inner > 1) is (found_s < flat_s)
    assert (inner > 1) is (min(each.seconds for each in links.forms(Message(op, 0, size))) < 0.9 * flat_s)
    assert Links(spec, (spec.device_count,)).message_s(Message(op, 0, size)) == flat_s


def test_small_messages_stay_flat_up_to_the_size_at_which_the_prices_meet(cluster: Path):
    """Across: (3/2 n - n) / B saved; a call, and latencies, more."""
    spec = ClusterSpec.from_file(cluster)
    links = Links(spec, (4,), two_level=True)
    sizes = [1 << power for power in range(2, 28)]

    forms = [links.form(Message("all_reduce", 0, size))[0] for size in sizes]

    assert forms == sorted(forms)
    assert (forms[0], forms[-1]) == (1, 2)
