"""Plans for ranks that share cores: slower while all compute, and faster where others wait."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.api.calibrating import _fitted, _Sharing
from autopar.simulate.planned import planned_timeline
from cost_models.cluster import ClusterSpec
from cost_models.collectives import collective_s, host_s
from cost_models.topology import axis_hops


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def plan(cluster: ClusterSpec, **fix: Any) -> autopar.Plan:
    with torch.device("meta"):
        return autopar.plan(Deep(), cluster, example_inputs=(torch.empty(1024, 256),), fix=fix)


def four_ranks(cores: float = 0.0) -> ClusterSpec:
    spec = ClusterSpec.parse("cpu:4")
    (group,) = spec.groups
    links = replace(group.node.links, host_bytes_per_s=3e8) if group.node.links else None
    return replace(spec, groups=(replace(group, node=replace(group.node, cores=cores, links=links)),))


def test_without_stages_all_ranks_compute_always_at_their_part_of_the_cores():
    own, shared = (plan(four_ranks(cores), dp_replicate=4) for cores in (0.0, 1.0))

    assert shared.estimates.breakdown.compute_s == pytest.approx(4 * own.estimates.breakdown.compute_s, rel=1e-9)
    assert shared.estimates.breakdown.optimizer_s == pytest.approx(4 * own.estimates.breakdown.optimizer_s, rel=1e-9)
    assert shared.estimates.mfu < own.estimates.mfu * 1.001  # of the cores that there are


def test_a_pipeline_on_shared_cores_is_slower_by_less_than_its_ranks_lack():
    fix = {"pp": 4, "schedule": "1f1b", "microbatch": 128}

    own, two, one = (plan(four_ranks(cores), **fix) for cores in (0.0, 2.0, 1.0))

    def spans(found: autopar.Plan) -> float:
        timeline = planned_timeline(found)
        assert timeline is not None
        return timeline.makespan_s

    forward_s = [sum(each.forward_s for each in found.estimates.per_stage) for found in (own, two)]
    assert forward_s[1] == pytest.approx(forward_s[0], rel=0.01)  # of the whole model, whatever the cut
    assert spans(own) < spans(two) < 2 * spans(own)
    work_s = sum(rank.compute_s for rank in planned_timeline(own).ranks)
    assert work_s * 0.99 < spans(one) < 4 * spans(own)
    assert two.estimates.breakdown.bubble_s / spans(two) < own.estimates.breakdown.bubble_s / spans(own)


@pytest.mark.parametrize("fix", [{"pp": 4, "schedule": "1f1b"}, {"pp": 2, "tp": 2, "schedule": "zb_h1"}])
def test_the_plans_file_tells_the_timeline_that_the_search_saw(fix: dict[str, Any]):
    found = plan(four_ranks(1.5), microbatch=128, **fix)

    timeline = planned_timeline(found)

    assert timeline is not None
    for rank, stage in zip(timeline.ranks, found.estimates.per_stage, strict=True):
        assert rank.compute_s == pytest.approx(stage.step_time_s, rel=1e-9)
        assert rank.compute_s > found.decisions.schedule.num_microbatches * stage.forward_s
    assert timeline.makespan_s <= found.estimates.step_time_s


def test_collectives_inside_stages_are_told_apart_from_the_cores_work():
    whole, split = (plan(four_ranks(2.0), microbatch=128, **fix) for fix in ({"pp": 4}, {"pp": 2, "tp": 2}))

    assert {each.forward_waiting_s for each in whole.estimates.per_stage} == {0.0}
    assert all(0 < each.forward_waiting_s < each.forward_s for each in split.estimates.per_stage)


def test_the_search_still_finds_a_pipeline_at_least_as_good_as_its_bound():
    found = plan(four_ranks(2.0), pp=2, microbatch=128)

    assert found.solver.bound <= found.estimates.step_time_s


def test_loopback_timed_while_all_ranks_communicate_is_fitted_as_of_one_that_has_a_core():
    truth = four_ranks(2.0).alone.levels[0]
    slow = four_ranks(2.0).levels[0]
    hops = axis_hops((slow,), (4,), 0)
    samples = [
        {"level": "node", "op": op, "ranks": 4, "bytes": size, "seconds": [collective_s(op, float(size), hops)]}
        for op in ("all_reduce", "all_gather")
        for size in (64, 4096, 2**20, 2**24)
    ]
    beside_s = 2.0 + 2 * truth.call_s + host_s("all_reduce", 2**24, hops)
    beside = {"seconds": [beside_s], "compute_s": 2.0, "beside": True, "op": "all_reduce", "bytes": 2**24}

    (found,) = _fitted((truth,), [*samples, {**beside, "level": "node", "ranks": 4}], _Sharing(cores=2.0, ranks=4))

    assert found.efficiency == pytest.approx(truth.efficiency, rel=0.02)
    assert found.latency_s + found.call_s == pytest.approx(truth.latency_s + truth.call_s, rel=0.1)
    assert found.host_bytes_per_s == pytest.approx(3e8, rel=0.05)


@pytest.mark.parametrize(
    ("cores", "ranks", "at_once"),
    [(1.87, 4, 2), (1.2, 2, 1), (0.4, 2, 1), (1.93, 2, 2), (3.6, 3, 3), (inf, 1, 1)],
)
def test_kernels_are_timed_on_as_many_ranks_at_once_as_there_are_cores(cores: float, ranks: int, at_once: int):
    assert _Sharing(cores, ranks).at_once == at_once


@pytest.mark.parametrize(("ranks", "cores"), [(4, 1.87), (5, 2.0), (2, 2.0), (3, 1.0)])
def test_every_rank_has_one_turn_and_never_more_of_them_than_cores(ranks: int, cores: float):
    class Alone:
        def __init__(self, rank: int) -> None:
            self.rank, self.turn = rank, 0

        def gather(self, _: None) -> None:
            self.turn += 1

    turns = []
    for rank in range(ranks):
        me = Alone(rank)
        turns.append(_Sharing(cores, ranks).in_turns(me, lambda me=me: me.turn))

    assert None not in turns
    assert max(turns.count(turn) for turn in turns) <= round(cores)
