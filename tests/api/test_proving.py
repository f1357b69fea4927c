"""In which order what is left is bounded: time may end before all of it was."""

from __future__ import annotations

from math import inf
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import autopar
from autopar.api.proving import prove
from autopar.api.solved import Solved
from autopar.api.solving import Solving
from autopar.api.standing import Standing
from autopar.api.wishes import read_wishes
from autopar.options import PlanOptions
from autopar.search.ilp import Solution
from autopar.search.meshes import MeshAxis
from autopar.search.trials import Recompute, Trial
from tests.api.test_outer import CAPTURED, cluster


def _standing(fluids: dict[Trial, float], done: list[tuple[str, Trial]], *, mixes: bool = False) -> Standing:
    """Return a search with a plan of 1 s, and trials that nothing is known of but these fluids."""
    parsed = PlanOptions.parse()
    standing = Standing(Solving(CAPTURED.graph, cluster(), parsed), read_wishes(parsed), mixes=mixes)
    best = Trial((MeshAxis("tp", 4),))
    standing.solved.append(Solved(best, Solution("gap", (0,), 1.0, 0.995), Mock(), 1.0))
    standing.solved += [Solved(each, Solution("cutoff", (), inf, 0.0)) for each in fluids]

    def fluid_of(trial: Trial) -> Mock:
        done.append(("fluid", trial))
        return Mock(step_s=fluids.get(trial, 1.0))

    def relaxed_s(trial: Trial, _: float) -> float:
        done.append(("relaxed", trial))
        return 1.0

    standing.fluid_of = fluid_of  # type: ignore[method-assign]
    standing.estimates.relaxed_s = relaxed_s  # type: ignore[method-assign]
    return standing


def _cut(count: int, recompute: Recompute = "none") -> Trial:
    return Trial((MeshAxis("microbatch", count), MeshAxis("dp_shard", 4)), 1, recompute)


def test_nothing_is_relaxed_before_all_is_bounded_as_a_fluid():
    done: list[tuple[str, Trial]] = []
    standing = _standing({_cut(2): 0.9, _cut(4): 0.8, _cut(8): 0.999}, done)

    prove(standing)

    kinds = [kind for kind, _ in done]
    first = kinds.index("relaxed")
    assert {trial for _, trial in done[:first]} == {_cut(2), _cut(4), _cut(8)}
    assert done[first] == ("relaxed", _cut(2)), "with the fewest micro-batches, which bounds all"
    assert min(one.solution.bound_s for one in standing.solved) >= 0.99


def test_stages_are_bounded_by_what_waits_for_what_before_anything_is_relaxed():
    done: list[tuple[str, Trial]] = []
    staged = Trial((MeshAxis("microbatch", 4), MeshAxis("dp_shard", 2)), 2, "none")
    fluids = {staged: 0.9, _cut(2): 0.95}
    standing = _standing(fluids, done)

    def tighten(trial: Trial) -> None:
        done.append(("tightened", trial))
        fluids[trial] = 0.97

    standing.tighten = tighten  # type: ignore[method-assign]

    prove(standing)

    told = [each for each in done if each[0] != "fluid"]
    assert told[0] == ("tightened", staged)
    assert next(trial for kind, trial in told if kind == "relaxed") == _cut(2)
    assert sum(kind == "tightened" for kind, _ in told) == 1
    bounds = {one.trial: one.solution.bound_s for one in standing.solved}
    assert bounds[staged] >= 0.97


@pytest.mark.parametrize(("any_way_s", "own"), [(0.995, 0), (0.9, 1)])
def test_what_any_recomputation_takes_is_enough_for_none_where_it_is_good(any_way_s: float, own: int):
    done: list[tuple[str, Trial]] = []
    standing = _standing({_cut(2): 0.999}, done, mixes=True)
    bound = standing.fluid_of
    standing.fluid_of = (  # type: ignore[method-assign]
        lambda trial: Mock(step_s=any_way_s) if trial == _cut(2, "full") else bound(trial)
    )

    prove(standing)

    assert done.count(("fluid", _cut(2))) == own


class Scaled(nn.Module):
    """Layers of a parameter that one number scales, and a loss: no sample is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 64))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        x = self.table * scale
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def test_programs_without_a_batch_are_proven_too():
    plan = autopar.plan(Scaled(), "h100-sxm-80gb:2", example_inputs=(torch.tensor(2.0),), gap=0.0)

    assert plan.workload.global_batch == 0
    assert 0.0 < plan.solver.bound <= plan.solver.objective
