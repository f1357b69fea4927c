"""Searches that end early: the best plan so far, with the gap that is proven by then, or why there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.api import solving
from autopar.api.planning import Planner
from autopar.errors import InfeasibleError
from autopar.progress import Silent
from autopar.search import ilp
from autopar.search.ilp import Solution
from tests.api.test_known_plans import Mlp


class Impatient(Silent):
    """Someone who presses Ctrl-C when the `presses`-th candidate is solved."""

    def __init__(self, presses: int) -> None:
        self.presses = presses
        self.best: list[float] = []

    def update(self, best_s=None, gap=None, done=None, total=None) -> None:
        """Count what was solved."""
        if best_s is not None:
            self.best.append(best_s)
            if len(self.best) == self.presses:
                raise KeyboardInterrupt


def plan(progress: Silent, **options: object) -> autopar.Plan:
    with torch.device("meta"):
        model, x = Mlp(512, 4), torch.empty(256, 512)
    return autopar.plan(model, "h100-sxm-80gb:4x2", example_inputs=(x, x), progress=progress, gap=0.0, **options)


def test_the_best_plan_so_far_has_the_gap_to_what_was_not_solved():
    whole = plan(Silent())
    watcher = Impatient(1)

    stopped = plan(watcher)

    assert stopped.solver.status == "interrupted"
    assert stopped.estimates.step_time_s == pytest.approx(watcher.best[0])
    assert stopped.solver.bound <= whole.estimates.step_time_s * (1 + 1e-9)
    assert stopped.solver.gap == pytest.approx(1 - stopped.solver.bound / stopped.solver.objective)
    assert any("the search was interrupted" in each.why_not for each in stopped.alternatives)


def test_nothing_is_saved_where_nothing_was_found(monkeypatch):
    monkeypatch.setattr(ilp, "_run", lambda solver, seconds: "interrupted")  # before it has begun

    with pytest.raises(KeyboardInterrupt):
        plan(Silent())


def test_ctrl_c_reaches_the_solver_that_runs_beside():
    class Solver:
        """What HiGHS does: it stops some time after it was told to."""

        def __init__(self) -> None:
            self.told = 0

        def startSolve(self) -> None:  # noqa: N802 - HiGHS's name
            self.waits = iter([KeyboardInterrupt, (False, None), KeyboardInterrupt, (True, None)])

        def setOptionValue(self, *_: object) -> None:  # noqa: N802 - HiGHS's name
            pass

        def getRunTime(self) -> float:  # noqa: N802 - HiGHS's name
            return 0.0

        def getModelStatus(self) -> None:  # noqa: N802 - HiGHS's name
            return None

        def cancelSolve(self) -> None:  # noqa: N802 - HiGHS's name
            self.told += 1

        def wait(self, seconds: float) -> object:
            each = next(self.waits)
            if each is KeyboardInterrupt:
                raise each
            return each

    solver = Solver()

    assert ilp._run(solver, seconds=60.0) == "interrupted"
    assert solver.told == 2


def out_of_time(monkeypatch, roles: set[str]) -> None:
    """Let every solve of a mesh with an axis of one of the roles end without a plan."""
    solve = solving.Solving.solve

    def solved(self, one, *rest):
        if roles & {axis.role for axis in one.trial.mesh} or one.trial.depth > 1:
            return solving.Solved(one.trial, Solution("time_limit", (), float("inf"), one.bound_s))
        return solve(self, one, *rest)

    monkeypatch.setattr(solving.Solving, "solve", solved)


def test_a_search_without_a_plan_in_time_falls_back_to_data_parallelism(monkeypatch):
    whole = plan(Silent())
    out_of_time(monkeypatch, {"free"})

    late = plan(Silent())

    assert late.solver.status == "time_limit"
    assert late.decisions.degrees["tp"] == 1
    assert late.solver.bound <= whole.solver.objective * (1 + 1e-9)
    assert late.solver.gap == pytest.approx(1 - late.solver.bound / late.solver.objective)


def test_a_search_that_finds_nothing_in_time_says_so(monkeypatch):
    out_of_time(monkeypatch, {"free", "dp_shard"})

    with pytest.raises(InfeasibleError, match=r"^no plan was found within the time limit of 60 s: \d+ of \d+ cand"):
        plan(Silent())


def test_when_time_is_over_without_a_plan_each_likely_trial_has_as_long_again_and_any_plan_of_it_will_do(monkeypatch):
    whole = plan(Silent())
    solve, solve_program, told, gaps = solving.Solving.solve, solving.solve_program, [], []

    def late(self, one, wishes, ways, best_s, left_s):
        if one.gap:
            told.append((one.trial, left_s))
        if not one.gap or left_s < float("inf"):
            return solving.Solved(one.trial, Solution("time_limit", (), float("inf"), one.bound_s))
        return solve(self, one, wishes, ways, best_s, left_s)

    def searched(program, limits):
        gaps.append(limits.gap)
        found = solve_program(program, limits)
        # Its plan takes longer than its table says: a reason to look again, were there time.
        return replace(found, objective_s=0.5 * found.objective_s, bound_s=0.5 * found.bound_s)

    monkeypatch.setattr(solving.Solving, "solve", late)
    monkeypatch.setattr(solving, "solve_program", searched)

    found = plan(Silent(), time_limit=50.0, fix={"pp": 1})

    first = [trial for trial, left_s in told if left_s == 50.0]
    assert len(set(first)) == len(first) > 1
    assert told == [*((trial, 50.0) for trial in first), (first[0], float("inf"))]
    assert gaps == [0.25]
    assert found.solver.status == "time_limit"
    assert found.solver.bound <= whole.solver.objective * (1 + 1e-9)


@pytest.mark.parametrize("at", ["data parallelism", "likeliest"])
def test_ctrl_c_ends_what_goes_on_when_time_is_over_without_a_plan(monkeypatch, at):
    plain, begun, tried = Planner._plain, ["search"], []

    def late(self, one, *rest):
        tried.append("likeliest" if one.gap else begun[-1])
        ended = "interrupted" if tried[-1] == at else "time_limit"
        return solving.Solved(one.trial, Solution(ended, (), float("inf"), one.bound_s))

    def plainly(self, *rest):
        begun.append("data parallelism")
        return plain(self, *rest)

    monkeypatch.setattr(solving.Solving, "solve", late)
    monkeypatch.setattr(Planner, "_plain", plainly)

    with pytest.raises(KeyboardInterrupt):
        plan(Silent())

    assert tried.count(at) == 1
    assert tried[-1] == at
