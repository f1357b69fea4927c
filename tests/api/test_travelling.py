"""What travels together is priced so: small gradients pay the latency of a few calls, not one each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

import autopar
from autopar.api.merging import with_room
from autopar.api.solving import Solving
from autopar.costs.links import Links
from autopar.costs.outcome import Outcome
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.plan import Plan
from autopar.ir.tensor import TensorMeta
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


def ethernet(hosts: int = 4) -> ClusterSpec:
    node = {"device": "a10g", "count": 1, "nic": {"bandwidth": "10Gbit/s", "latency": "25us"}}
    groups = [{"node": "slow", "count": hosts}]
    return ClusterSpec.from_dict({"version": 1, "name": "ethernet", "nodes": {"slow": node}, "groups": groups})


def convolved(batch: int, **options: object) -> Plan:
    images = torch.ones(batch, 512, 8, 8)
    return autopar.plan(Convolutions(), ethernet(), example_inputs=(images,), precision="bf16", **options)


@pytest.mark.parametrize("role", ["dp_replicate", "dp_shard"])
def test_gradients_that_are_waited_for_where_they_are_cast_may_all_travel_together(role: str):
    made = convolved(64, fix={role: 4})

    taken_s = sum(each.count * each.predicted_s for each in made.decisions.collectives)
    assert exposed_s(made) < 1.05 * taken_s


@pytest.mark.parametrize(("reduce_dtype", "item_bytes"), [("own", 2), ("fp32", 4)])
def test_gradients_that_are_cast_are_reduced_behind_computation_in_the_type_asked_for(
    reduce_dtype: str, item_bytes: int
):
    """Also those that are made beside gradients of inputs, as convolutions make them."""
    made = convolved(1024, fix={"dp_replicate": 4}, reduce_dtype=reduce_dtype)

    sums = [each for each in made.decisions.collectives if each.op == "all_reduce" and each.phase == "backward"]
    assert sum(each.count * each.bytes for each in sums) == item_bytes * 6 * 512 * 512 * 9
    assert all(each.overlapped for each in sums)


@pytest.mark.parametrize("batch", [pytest.param(64, marks=pytest.mark.slow), 1024])
def test_no_way_to_run_convolutions_in_16_bits_beats_the_bound_of_the_free_search(batch: int):
    free = convolved(batch)
    ways = [{"dp_replicate": 4}, {"dp_shard": 4}, {"dp_shard": 4, "zero": 3}, {"tp": 4}, {"dp_replicate": 2, "tp": 2}]
    times = [convolved(batch, fix=fix).estimates.step_time_s for fix in ways]

    assert free.solver.bound <= min(times) * (1 + 1e-9)
    assert free.estimates.step_time_s <= 1.02 * min(times)


_TOGETHER = Links(ClusterSpec.parse("dgx-h100x4"), (8, 4), bucket_bytes=2**30)
_ALONE = Links(ClusterSpec.parse("dgx-h100x4"), (8, 4))


def way_s(links: Links, before: tuple[Placement, ...], after: tuple[Placement, ...], travels: tuple[str, ...]) -> float:
    return float(links.routes((before,), (after,), TensorMeta((64, 64), "float32"), travels=travels).price_s[0, 0])


@pytest.mark.parametrize(
    ("before", "after", "travels", "together"),
    [
        ((Replicate(), Shard(0)), (Replicate(), Replicate()), ("all_gather",), True),
        ((Partial(), Replicate()), (Shard(0), Replicate()), ("reduce_scatter",), True),
        ((Shard(0), Shard(1)), (Replicate(), Replicate()), ("all_gather",), False),
        ((Shard(0), Replicate()), (Shard(1), Replicate()), ("all_gather",), False),
        ((Shard(0), Replicate()), (Replicate(), Replicate()), ("all_reduce", "reduce_scatter"), False),
    ],
    ids=["a gather", "a sum", "two gathers", "an exchange", "what gathers a gradient"],
)
def test_only_what_one_collective_moves_is_priced_as_part_of_a_larger_one(
    before: tuple[Placement, ...], after: tuple[Placement, ...], travels: tuple[str, ...], together: bool
):
    priced_s, alone_s = (way_s(links, before, after, travels) for links in (_TOGETHER, _ALONE))

    assert priced_s < 0.1 * alone_s if together else priced_s == alone_s


@dataclass(frozen=True)
class _Merging:
    """What `with_room` asks of an outcome: here twice what is spare is held, and 10 beside it."""

    spare_bytes: int = 0
    merges: bool = True
    microbatches: int = 1

    def messages(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(mergeable=True, message=SimpleNamespace(op="all_gather"))]

    def merging(self, *, spare_bytes: int = 0, merges: bool = True) -> _Merging:
        return _Merging(spare_bytes, merges)

    def memory(self) -> SimpleNamespace:
        return SimpleNamespace(total=10 + 2 * self.spare_bytes * self.merges)


@pytest.mark.parametrize(("budget", "spare"), [(10, 0), (90, 40), (74, 32), (58, 24)])
def test_collectives_may_hold_as_much_as_fits_of_what_is_spare(budget: int, spare: int):
    assert with_room(cast("Outcome", _Merging()), budget).spare_bytes == spare


def test_an_outcome_with_another_room_is_as_one_that_was_made_with_it(monkeypatch: pytest.MonkeyPatch):
    found: list[Outcome] = []
    monkeypatch.setattr("autopar.api.solving.with_room", lambda outcome, _: found.append(outcome) or outcome)
    fix = {"dp_shard": 8, "zero": 3}
    autopar.plan(Deep(), "h100-sxm-80gb:8", example_inputs=(torch.ones(4096, 64),), fix=fix)
    outcome = found[0]
    alone = outcome.merging(merges=False)  # remembers what does not depend on the room

    for room in (0, 1 << 16, 1 << 30):
        moved, anew = alone.merging(spare_bytes=room), replace(outcome, merges=True, spare_bytes=room)

        assert moved.runs == anew.runs
        assert moved.memory() == anew.memory()
        assert moved.step_s == anew.step_s
    assert len(alone.merging(spare_bytes=0).runs) != len(alone.merging(spare_bytes=1 << 30).runs)
