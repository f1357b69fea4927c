"""Blocks are recomputed each in its way: no more than memory asks for."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.api import lightening
from autopar.api.floors import names_again
from autopar.api.pipelining import Wanted
from autopar.api.planning import Planner, Program
from autopar.api.solved import Solved
from autopar.api.solving import Solving, Waiting
from autopar.api.wishes import read_wishes
from autopar.capture import Captured
from autopar.capture.recompute import SUFFIX, blocks_of, recomputed, recomputed_graph
from autopar.costs.again import kept_values
from autopar.costs.outcome import Outcome
from autopar.errors import InfeasibleError, StalePlanError
from autopar.ir.plan import Plan
from autopar.models.zoo.gpt import GptSettings
from autopar.options import PlanOptions
from autopar.search.ilp import Solution
from autopar.search.meshes import MeshAxis, Role
from autopar.search.recomputing import Room, Ways
from autopar.search.trials import Recompute, Trial
from tests.support.ranks import RankPool
from tests.support.remembering import remembered
from tests.support.training import Trained, train
from tests.support.two_hosts import cluster

MESH = (MeshAxis("dp_replicate", 2),)
FIX = {"pp": 1, "dp_replicate": 2, "microbatch": 64}


class Wide(nn.Module):
    """Residual blocks of unequal widths, and a loss."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32), nn.Tanh()) for width in widths
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def captured(*widths: int) -> Captured:
    return remembered(Wide(widths), (torch.empty(128, 32),))


def planned(program: Captured, memory_bytes: int, **fix: object) -> Plan:
    options = PlanOptions.parse(fix={**FIX, **fix}, memory_margin=0, gap=0.0)
    return Planner(Program(program.graph, "wide", "", None), cluster(memory_bytes), options).plan()


def test_less_memory_takes_more_time_step_by_step_until_nothing_fits():
    program = captured(*[64] * 6)
    memory = float(planned(program, 1 << 30).estimates.peak_memory_bytes)
    times = []
    with suppress(InfeasibleError):
        while True:
            times.append(planned(program, int(memory)).estimates.step_time_s)
            memory *= 0.96
    with pytest.raises(InfeasibleError, match="even the smallest needs"):
        planned(program, int(memory))

    assert times == sorted(times)
    assert len(set(times)) >= 5
    assert times[-1] <= planned(program, 1 << 30, recompute="full").estimates.step_time_s


class Shown(Wide):
    """The same with values beside the loss, whose layout is decided by itself."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean(), x.detach()


@pytest.mark.parametrize("fix", [{}, {"microbatch": 16}])
def test_outputs_beside_the_loss_stay_where_they_are(fix: dict[str, int]):
    program = remembered(Shown((64,) * 6), (torch.empty(128, 32),))
    fixed = FIX | {"dp_replicate": 1, "dp_shard": 2} | fix
    options = PlanOptions.parse(fix=fixed, memory_margin=0, gap=0.0)
    source = Program(program.graph, "shown", "", None)
    most = Planner(source, cluster(1 << 30), options).plan()

    plan = Planner(source, cluster(int(most.estimates.peak_memory_bytes * 0.8)), options).plan()

    assert 0 < len(plan.decisions.recompute) < 6
    assert set(plan.decisions.outputs) == {"0", "1"}


def test_long_sequences_recompute_all_but_attention():
    """Its kernel takes most of a layer's time and leaves one value of the many that the layer leaves."""
    settings = GptSettings(layers=4, hidden=64, heads=4, vocab=64, positions=2048, fused_attention=True)
    program = remembered(settings.model(), settings.inputs(4, 2048))
    fix = {"pp": 1, "dp_replicate": 2, "microbatch": 2}

    def planned_in(memory_bytes: int, **more: str) -> Plan:
        options = PlanOptions.parse(fix=fix | more, memory_margin=0, gap=0.0)
        return Planner(Program(program.graph, "gpt", "", None), cluster(memory_bytes), options).plan()

    most, least = (planned_in(1 << 40, recompute=way).estimates for way in ("none", "full"))
    memory = int(least.peak_memory_bytes + 0.1 * (most.peak_memory_bytes - least.peak_memory_bytes))

    found = planned_in(memory)

    assert "keep_attention" in set(found.decisions.recompute.values())
    assert found.estimates.step_time_s - most.step_time_s < 0.5 * (least.step_time_s - most.step_time_s)


@pytest.mark.parametrize(
    "share", [pytest.param(0.25, marks=pytest.mark.slow), 0.5, pytest.param(0.75, marks=pytest.mark.slow)]
)
def test_the_ways_found_are_the_best_of_all_combinations(share: float):
    program = captured(48, 96, 32)
    most = planned(program, 1 << 30).estimates.peak_memory_bytes
    least = planned(program, 1 << 30, recompute="full").estimates.peak_memory_bytes
    memory = int(least + share * (most - least))
    options = PlanOptions.parse(fix=FIX, memory_margin=0, gap=0.0)
    solving = Solving(program.graph, cluster(memory), options)
    paths = blocks_of(program.graph)
    every: list[Recompute] = [
        tuple(zip(paths, ways, strict=True))
        for ways in product(("none", "cheap", "per_operator", "full"), repeat=len(paths))
    ]

    best = min(_solved(solving, each).step_s for each in every)

    assert planned(program, memory).estimates.step_time_s <= best * (1 + 1e-6)


@pytest.mark.parametrize("role", ["dp_shard", "tp"])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_recomputed_costs_in_known_layouts_what_it_costs_among_all_others(role: Role, depth: int):
    program = captured(48, 96, 32)
    options = PlanOptions.parse(fix={"pp": depth, "microbatch": 32}, memory_margin=0, gap=0.0)
    solving, wishes = Solving(program.graph, cluster(1 << 30, 2 * depth), options), read_wishes(options)
    trial = Trial((MeshAxis("microbatch", 4), MeshAxis(role, 2)), depth, "full")
    waiting = solving.bound(trial, wishes, 60.0)
    assert isinstance(waiting, Waiting)
    known = solving.solve(waiting, wishes, (Wanted(depth),), inf, 60.0).outcome
    assert known is not None
    first, second, _ = blocks_of(program.graph)
    lighter = replace(trial, recompute=((first, "full"), (second, "cheap")))

    alone, among = lightening._priced_as(solving, wishes, lighter, known), solving.unbounded(lighter, wishes)

    assert among is not None
    ways = 4  # a parameter is gathered once a step or in each phase, its gradient reduced once or in each micro-batch
    assert max(len(each.options) for each in alone.pricing.clusters) <= ways
    assert sum(len(each.options) for each in alone.pricing.clusters) < sum(
        len(each.options) for each in among.pricing.clusters
    )
    told = [_as_known(solving, each, known) for each in (alone, among)]
    assert told[0].step_s == told[1].step_s != known.step_s
    assert told[0].memory() == told[1].memory()


def _as_known(solving: Solving, priced: Waiting, known: Outcome) -> Outcome:
    options = lightening._same_options(priced.pricing, known)
    assert options is not None
    return solving.outcome(priced, read_wishes(solving.options), Solution("gap", options, inf, 0.0))


def _solved(solving: Solving, recompute: Recompute) -> Solved:
    wishes = read_wishes(solving.options)
    bounded = solving.bound(Trial(MESH, 1, recompute), wishes, 60.0)
    return bounded if isinstance(bounded, Solved) else solving.solve(bounded, wishes, (), inf, 60.0)


@dataclass(frozen=True)
class Named:
    """A way to run stages."""

    name: str
    step_s: float

    def __str__(self) -> str:
        return self.name


@pytest.mark.parametrize(("budget_bytes", "fastest"), [(250, "few in flight"), (1000, "many in flight"), (99, "first")])
def test_stages_run_in_the_schedule_that_leaves_room_for_less_recomputation(
    monkeypatch: pytest.MonkeyPatch, budget_bytes: int, fastest: str
):
    """Where memory is short, a schedule with a longer bubble and fewer micro-batches in flight recomputes less."""
    ways = Ways(np.array([[0.0, 1.0]] * 2), np.array([[100.0, 0.0]] * 2))
    flying = {"first": 9.0, "many in flight": 4.0, "few in flight": 1.0}

    def rooms(_: object, one: Solved) -> list[Room]:
        return [Room(100.0 if budget_bytes < 100 else 50.0, np.full(2, flying[name_of(one)]))]

    def name_of(one: Solved) -> str:
        return "first" if one.pipeline is None else str(one.pipeline)

    monkeypatch.setattr(lightening, "_all_rooms", rooms)
    one = Solved(Trial(MESH, 2, "full"), Solution("gap", (0,), 12.0, 0.0), step_s=12.0)
    others: Any = [Named("many in flight", 11.0), Named("few in flight", 11.5)]
    solving: Any = SimpleNamespace(budget=budget_bytes)
    again: Any = None

    found = lightening._promising(solving, again, ways, one, others)

    assert name_of(found) == fastest


def test_what_is_kept_is_nothing_that_runs_again():
    """Backward reads ReLU's output through a view of its own."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)))
    graph = remembered(model, (torch.empty(4, 8),)).graph
    again = names_again(graph, "full")

    kept = {name for name, _ in kept_values(graph, again)}

    assert any("relu" in name for name in again)
    assert any("relu" in name for name, _ in kept_values(graph, ()))
    assert not kept & again


def test_a_program_with_some_blocks_recomputed_computes_the_same():
    torch.manual_seed(0)
    program, again = captured(16, 24, 16), captured(16, 24, 16)
    ways = {"blocks.0": "full", "blocks.1": "cheap", "blocks.2": "per_operator"}
    again = recomputed(again, ways)
    values = [
        torch.randn(node.meta["val"].shape) if node.meta["val"].shape else torch.ones(())
        for node in program.joint.graph.find_nodes(op="placeholder")
    ]

    for ours, theirs in zip(again.joint(*values), program.joint(*values), strict=True):
        torch.testing.assert_close(ours, theirs)
    copied = {node.name.removesuffix(SUFFIX) for node in again.joint.graph.nodes if node.name.endswith(SUFFIX)}
    assert {program.graph.by_name[name].module.rsplit(".", 1)[0] for name in copied} == {*ways}
    assert [op.name for op in again.graph.ops] == [n.name for n in again.joint.graph.nodes if n.op != "output"]


def wide() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Wide((64,) * 6), (torch.randn(128, 32),)


def scarce_bytes(fix: dict[str, object], share: float) -> int:
    """Return a memory `share` of the way from what recomputing all needs to what recomputing nothing needs."""
    model, example = wide()
    most, least = [
        autopar.plan(
            model, cluster(1 << 30), example_inputs=example, fix={**fix, "recompute": way}, memory_margin=0.0
        ).estimates.peak_memory_bytes
        for way in ("none", "full")
    ]
    return int((least + share * (most - least)) / 0.9)


def run(_rank: int, memory_bytes: int, fix: dict[str, object]) -> Trained:
    return train(*wide(), cluster(memory_bytes), fix)


@pytest.mark.parametrize(
    ("fix", "share"),
    [({"dp_replicate": 2, "microbatch": 64}, 0.5), ({"pp": 2, "microbatch": 32, "schedule": "1f1b"}, 0.3)],
    ids=["data", "stages"],
)
def test_steps_with_some_blocks_recomputed_equal_the_models_own(fix: dict[str, object], share: float):
    memory_bytes = scarce_bytes(fix, share)
    model, example = wide()
    ways = autopar.plan(model, cluster(memory_bytes), example_inputs=example, fix=fix).decisions.recompute

    with RankPool(2) as pool:
        first, second = pool.values(run, memory_bytes, fix)

    assert 0 < len(ways) < 6
    assert "*" not in ways
    assert first.losses == second.losses
    assert max(first.worst_gradient, second.worst_gradient) < 1e-4


def test_equal_layers_with_equal_ways_share_their_decisions():
    graph = captured(*[64] * 8).graph
    one_way = recomputed_graph(graph, {"*": "full"})
    two_ways = recomputed_graph(graph, dict.fromkeys(blocks_of(graph)[:4], "full"))

    def kinds(of: object) -> int:
        return len({of.representative(op.name) for op in of.ops})  # type: ignore[attr-defined]

    assert kinds(two_ways) < kinds(one_way) + kinds(graph)


def test_a_plan_for_other_blocks_is_refused():
    with pytest.raises(StalePlanError, match=r"recomputes blocks\.7, which is no block .*blocks\.0 to blocks\.1"):
        recomputed(captured(16, 16), {"blocks.7": "full"})
    with pytest.raises(StalePlanError, match="'sometimes'"):
        recomputed(captured(16, 16), {"*": "sometimes"})
