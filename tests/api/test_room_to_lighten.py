"""Layouts and recomputation are decided together: what is whole leaves no room for what is not recomputed."""

from __future__ import annotations

from functools import cache

import pytest

from autopar import api
from autopar.api import lightening
from autopar.api.planning import Planner, Program
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.models import resolve
from autopar.options import PlanOptions
from cost_models.cluster import ClusterSpec

MEMORY = "5 GiB"
"""A little more than half of what the fastest plan holds."""


@cache
def program() -> Graph:
    small = {"layers": "2", "vocab": "8192"}
    found = resolve("zoo:llama3-8b", batch=32, seq=4096, overrides=small)
    return api.program_of(found.model, found.shallow, found.example_inputs, "bf16")


def planned(**fix: object) -> Plan:
    links = {"bandwidth": "450GB/s", "latency": "1us", "topology": "switch"}
    device = {"preset": "h100-sxm-80gb", "memory": {"capacity": MEMORY, "reserved": "0 B"}}
    spec = ClusterSpec.from_dict({
        "version": 1,
        "name": "little memory",
        "devices": {"small": device},
        "nodes": {"node": {"device": "small", "count": 4, "links": links}},
        "groups": [{"node": "node", "count": 1}],
    })  # fmt: skip
    fixed = {"dp_shard": 4, "microbatch": 2, **fix}
    options = PlanOptions.parse(precision="bf16", optimizer="adamw", memory_margin=0, gap=0.0, fix=fixed)
    return Planner(Program(program(), "llama", "", None), spec, options).plan()


def test_free_plans_are_no_slower_than_those_that_gather_and_recompute_as_they_are_told(
    monkeypatch: pytest.MonkeyPatch,
):
    """The fastest layouts with all recomputed hold parameters and sums whole: recomputing less then has no room."""
    free, gathered = planned(), planned(zero=3)
    monkeypatch.setattr(lightening, "_with_room", lambda *_: None)

    greedy = planned()

    assert free.estimates.step_time_s <= 1.001 * gathered.estimates.step_time_s
    assert free.estimates.step_time_s < 0.98 * greedy.estimates.step_time_s
    assert free.decisions.recompute
