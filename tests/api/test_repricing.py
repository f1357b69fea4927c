"""A plan's decisions priced for another cluster, and for its own, where nothing may change."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.api import plan_captured
from autopar.api.repricing import repriced
from autopar.capture import Captured
from autopar.cli import main
from autopar.errors import StalePlanError, UsageError
from autopar.ir.graph import Graph
from autopar.ir.placement import Layout, Replicate, Shard
from autopar.ir.plan import Plan
from autopar.models.hf_tiny import tiny
from autopar.options import PlanOptions
from autopar.progress import Silent
from cost_models.cluster import ClusterSpec
from tests.api.test_two_level import TWO_BY_TWO
from tests.support.remembering import remembered

VERSION = torch.__version__.partition("+")[0]

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "cpu:4", {"tp": 2, "dp_replicate": 2}),
    ("llama", "cpu:4", {"dp_shard": 4, "zero": 3, "recompute": "full"}),
    ("llama", "cpu:4", {"dp_shard": 4, "zero": 1, "microbatch": 1}),
    ("llama", "cpu:4", {"dp_shard": 4, "zero": 2, "microbatch": 1}),
    ("gpt2", "cpu:4", {"pp": 2, "tp": 2, "schedule": "zb_h1"}),
    ("bert", "cpu:2x2", {"dp_shard": 2, "tp": 2, "pp": 1, "microbatch": 4}),
    ("t5", "cpu:2", {"pp": 2, "schedule": "interleaved_1f1b", "interleave": 2}),
    ("resnet", "cpu:2", {"dp_replicate": 2}),
    ("gpt2", "cpu:4", {"tp": 2, "dp_shard": 2, "zero": 2, "microbatch": 2}),
    ("mixtral", "cpu:2", {}),
]


@cache
def captured(name: str) -> Captured:
    return remembered(*tiny(name))


def planned(name: str, cluster: str, fix: dict[str, Any]) -> tuple[Plan, Graph]:
    program = captured(name)
    return _planned(name, cluster, tuple(fix.items())), program.graph


@cache
def _planned(name: str, cluster: str, fix: tuple[tuple[str, Any], ...]) -> Plan:
    options = PlanOptions.parse(fix=dict(fix))
    return plan_captured(captured(name), name, ClusterSpec.parse(cluster), options, Silent())


@pytest.mark.parametrize(("name", "cluster", "fix"), CASES, ids=str)
def test_on_its_own_cluster_a_plan_is_priced_as_it_was_searched(name: str, cluster: str, fix: dict[str, Any]):
    plan, graph = planned(name, cluster, fix)

    again = repriced(plan, graph, ClusterSpec.parse(cluster), VERSION)

    assert again.decisions == plan.decisions
    assert again.estimates.memory == plan.estimates.memory
    assert again.estimates.per_stage == plan.estimates.per_stage
    assert asdict(again.estimates.breakdown) == pytest.approx(asdict(plan.estimates.breakdown), rel=1e-12)
    assert again.estimates.step_time_s == pytest.approx(plan.estimates.step_time_s, rel=1e-12)
    assert again.solver.objective == again.estimates.step_time_s


@pytest.mark.parametrize("layout", [(Replicate(), Shard(1)), (Shard(0), Shard(1)), (Replicate(),) * 2], ids=str)
def test_an_output_may_have_another_layout_than_its_producer_makes(layout: Layout):
    plan, graph = planned(*CASES[0])
    assert plan.decisions.outputs["logits"] != layout
    outputs = {**plan.decisions.outputs, "logits": layout}
    moved = replace(plan, decisions=replace(plan.decisions, outputs=outputs))

    again = repriced(moved, graph, ClusterSpec.parse("cpu:4"), VERSION)

    assert again.decisions.outputs == outputs
    assert again.decisions.operators == plan.decisions.operators
    assert again.estimates.step_time_s == pytest.approx(plan.estimates.step_time_s, rel=0.2)


def twice(cluster: str, **changes: Any) -> ClusterSpec:
    """Return a cluster of the catalogue with other figures of its devices."""
    given = ClusterSpec.parse(cluster).to_dict()
    (device,) = given["devices"].values()
    device.update(changes)
    return ClusterSpec.from_dict(given)


def wide() -> Captured:
    with torch.device("meta"):
        model, x = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3))), torch.empty(512, 1024)
    return remembered(model, (x,))


@pytest.mark.parametrize("left_out", ["overlap", "two_level"])
def test_what_a_plan_was_made_without_it_is_priced_without(left_out: str, tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO_BY_TWO)
    program, cluster = wide(), ClusterSpec.parse(str(path))
    made = [
        plan_captured(program, "wide", cluster, PlanOptions.parse(fix={"dp_replicate": 4}, **how), Silent())
        for how in ({}, {left_out: False})
    ]
    without = made[1]
    assert made[0].decisions != without.decisions

    again = repriced(without, program.graph, cluster, VERSION)

    assert again.decisions == without.decisions
    assert again.estimates == without.estimates


def test_layouts_and_stages_stay_and_figures_are_those_of_the_other_cluster():
    plan, graph = planned("llama", "cpu:4", {"pp": 2, "tp": 2})
    rates = {"float32": "388GFLOP/s"}  # four times as many

    there = repriced(plan, graph, twice("cpu:4", compute=rates), VERSION)

    assert there.decisions.operators.keys() == plan.decisions.operators.keys()
    assert all(
        each.strategy == plan.decisions.operators[name].strategy for name, each in there.decisions.operators.items()
    )
    assert there.decisions.stages == plan.decisions.stages
    assert there.decisions.parameters == plan.decisions.parameters
    assert there.estimates.step_time_s < plan.estimates.step_time_s
    assert there.estimates.memory == plan.estimates.memory
    assert there.fingerprint.cluster != plan.fingerprint.cluster
    assert there.solver.bound <= there.solver.objective == there.estimates.step_time_s


def test_what_is_searched_for_a_cluster_is_no_slower_there_than_what_was_searched_for_another():
    plan, graph = planned("llama", "cpu:4", {})
    other = "cpu:2x2"

    there = repriced(plan, graph, ClusterSpec.parse(other), VERSION)
    own, _ = planned("llama", other, {})

    assert own.solver.bound <= there.estimates.step_time_s
    assert own.estimates.step_time_s <= there.estimates.step_time_s * 1.02  # plans alike within 2 % are as good


def test_what_does_not_fit_is_priced_and_a_warning_says_so():
    plan, graph = planned("llama", "cpu:2", {"dp_replicate": 2})
    held = plan.estimates.peak_memory_bytes

    there = repriced(plan, graph, twice("cpu:2", memory={"capacity": f"{held}B", "bandwidth": "10GB/s"}), VERSION)

    assert [each.code for each in there.warnings] == ["does-not-fit"]
    assert "it does not fit; plan anew for this cluster" in there.warnings[0].text
    assert there.estimates.peak_memory_bytes == held


@pytest.mark.parametrize(
    ("cluster", "text"),
    [("cpu:4", "the plan is for 2 devices and cluster 'cpu:4' has 4"), ("cpu:1", "has 1; give a cluster of 2")],
)
def test_a_cluster_of_another_size_is_refused(cluster: str, text: str):
    plan, graph = planned("llama", "cpu:2", {"tp": 2})

    with pytest.raises(UsageError) as caught:
        repriced(plan, graph, ClusterSpec.parse(cluster), VERSION)

    assert text in str(caught.value)


def test_a_plan_of_another_program_is_stale():
    plan, _ = planned("llama", "cpu:2", {"tp": 2})
    _, other = planned("gpt2", "cpu:2", {"tp": 2})

    with pytest.raises(StalePlanError):
        repriced(plan, other, ClusterSpec.parse("cpu:2"), VERSION)


def test_the_command_prints_both_clusters_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    wanted = ["zoo:gpt-tiny", "--batch", "8", "--seq", "32"]
    assert main(["plan", *wanted, "-c", "cpu:2", "--fix", "tp=2", "-o", str(first)]) == 0
    capsys.readouterr()

    assert main(["simulate", str(first), "-c", "h100-sxm-80gb:2", "-o", str(second), "--json"]) == 0

    told = capsys.readouterr()
    assert json.loads(told.out) == json.loads(second.read_text())
    assert told.err.splitlines()[-1].startswith("on cpu:2: step ")
    assert re.search(r"\([1-9][.\d]* times as fast\)$", told.err)
    assert told.err.splitlines()[-2].endswith(", priced as it is, not searched")
    there = Plan.load(second)
    assert there.cluster["name"] == "h100-sxm-80gb:2"
    assert there.decisions.degrees["tp"] == 2
    assert there.solver.status == "priced"
    assert main(["simulate", str(second), "-c", "cpu:2"]) == 0
    assert re.search(r"\([1-9][.\d]* times as long\)$", capsys.readouterr().err)

    renamed = replace(there, workload=replace(there.workload, model="Model"))
    renamed.save(second)
    assert main(["simulate", str(second), "-c", "cpu:2"]) == UsageError.exit_code
    assert "a class and no reference" in capsys.readouterr().err


def test_a_plan_keeps_the_settings_that_its_model_was_made_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(tmp_path / "a.json")
    wanted = ["zoo:gpt-tiny", "--batch", "8", "--seq", "32", "--set", "layers=1", "--set", "vocab=64"]
    assert main(["plan", *wanted, "-c", "cpu:2", "--fix", "tp=2", "-o", path]) == 0
    assert "zoo:gpt-tiny --set layers=1 --set vocab=64" in capsys.readouterr().err

    assert Plan.load(path).workload.settings == {"layers": "1", "vocab": "64"}
    assert main(["simulate", path, "-c", "h100-sxm-80gb:2"]) == 0
    assert main(["simulate", path, "-c", "h100-sxm-80gb:2", "--set", "layers=2"]) == StalePlanError.exit_code
