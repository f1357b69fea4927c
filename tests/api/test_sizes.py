"""Which sizes of micro-batches are tried, and which only bounded."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import pytest
import torch

from autopar.api import plan_captured
from autopar.api.outer import Outer
from autopar.capture import Captured
from autopar.ir.plan import Plan
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.search.meshes import MeshAxis
from autopar.search.trials import Trial, depths, in_time, near_sizes, sizes_worth_trying
from cost_models.cluster import ClusterSpec
from tests.api.test_outer import Deep, cluster
from tests.api.test_relations import World
from tests.support.remembering import remembered


def test_meshes_and_sizes_to_try():
    assert depths(12, 5) == [1, 2, 3, 4]
    assert sizes_worth_trying(16) == [1, 2, 4, 8, 16]
    assert sizes_worth_trying(12) == [1, 2, 4, 12]
    free = (MeshAxis("free", 2),)
    assert in_time([free], 4, 2) == [(MeshAxis("microbatch", 2), MeshAxis("tp", 2)), (MeshAxis("dp_shard", 2),)]


def test_sizes_of_micro_batches_between_those_tried_first_are_found():
    """Of 24 samples, 6 lie between 4, which waste time on small operators, and 12, of which two leave ranks idle."""
    with torch.device("meta"):
        captured = remembered(Deep((256,) * 4), (torch.empty(24, 64, 128),))
    core = {"capacity": "8.6 MiB", "reserved": "0 B", "bandwidth": "200 GB/s"}
    spec = cluster(bandwidth="100 Mbit/s").to_dict()
    spec["devices"] = {"core": {"preset": "a100-sxm-80gb", "memory": core, "compute": {"fp32": "200 GFLOP/s"}}}
    spec["groups"] = [{"node": "host", "count": 2}]

    def plan(**fix: object) -> Plan:
        options = PlanOptions.parse(fix={"pp": 2, "recompute": "none", **fix}, memory_margin=0.0)
        return plan_captured(captured, "Deep", ClusterSpec.from_dict(spec), options, Silent())

    times = {size: plan(microbatch=size).estimates.step_time_s for size in (4, 6, 8, 12)}
    free = plan()

    assert 6 not in sizes_worth_trying(24)
    assert min(times, key=times.__getitem__) == 6
    assert (free.workload.microbatch, free.estimates.step_time_s) == (6, times[6])


def test_near_sizes_of_micro_batches_are_within_a_factor_of_two():
    mesh = (MeshAxis("microbatch", 6), MeshAxis("dp_shard", 2))

    def counts(trial: Trial, batch: int) -> list[int]:
        return [each.microbatches for each in near_sizes(trial, batch)]

    assert counts(Trial(mesh, 2), 48) == [3, 4, 8, 12]  # of 24 samples a rank
    assert counts(Trial(mesh[1:]), 48) == [2]
    assert counts(Trial(mesh[1:]), 3) == []
    assert counts(Trial((MeshAxis("free", 2),)), 48) == []


def tiny_products(samples: int) -> Captured:
    """Return a program whose products of all samples are smaller than a tile: fewer take no less."""
    with torch.device("meta"):
        return remembered(Deep((128,) * 4), (torch.empty(samples, 128),))


SIX = World(hosts=1, devices=6, tflops=1e-3, memory_mib=100, links_gbytes=1, adapter_gbits=1, latency_us=10)


def test_pipelines_that_idle_are_tried_where_smaller_micro_batches_take_no_less():
    """Three stages of one micro-batch were faster than what was found, and faster than what was proven."""
    program = tiny_products(12)

    def plan(**fix: object) -> Plan:
        return plan_captured(program, "Deep", SIX.spec(), PlanOptions.parse(time_limit=60.0, fix=fix), Silent())

    free = plan()

    for data, size in product((1, 2), (2, 6)):
        fixed = plan(pp=3, dp_replicate=data, microbatch=size)
        assert free.estimates.step_time_s <= 1.01 * fixed.estimates.step_time_s


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_is_proven_is_proven_of_sizes_between_those_tried_too(interrupted: bool):
    seen: list[Outer] = []

    def run(search: Outer, *trials: list[Trial]) -> None:
        seen.append(search)
        original(search, *trials)

    original = Outer.run
    stop = patch.object(Outer, "_run_others", side_effect=KeyboardInterrupt)
    with patch.object(Outer, "run", run):
        if interrupted:
            with stop:
                plan_captured(tiny_products(12), "Deep", cluster(), PlanOptions.parse(), Silent())
        else:
            plan_captured(tiny_products(12), "Deep", cluster(), PlanOptions.parse(), Silent())

    known = [one.trial for one in seen[0].standing.solved]
    ranks = (MeshAxis("tp", 2),)
    assert sorted(each.microbatches for each in known if each.ranks == ranks and each.recompute == "none") == [
        1, 2, 3, 4, 6, 12,
    ]  # fmt: skip
    assert len(known) == len(set(known))
