"""The outer search against the trials one by one."""

from __future__ import annotations

from itertools import product
from math import inf
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from autopar.api import plan_captured
from autopar.api.outer import Outer
from autopar.api.planning import Planner, Program
from autopar.api.proving import raise_bounds
from autopar.api.solved import Solved
from autopar.api.solving import Solving, Waiting
from autopar.api.standing import Standing
from autopar.api.wishes import read_wishes
from autopar.costs.stage_memory import Split
from autopar.errors import InfeasibleError, UsageError
from autopar.ir.plan import Plan
from autopar.ir.stages import stage_of
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.search.ilp import Solution
from autopar.search.meshes import MeshAxis
from autopar.search.trials import Trial
from cost_models.cluster import ClusterSpec
from tests.support.remembering import remembered


class Deep(nn.Module):
    """Residual blocks of unequal widths, and a loss."""

    def __init__(self, widths: tuple[int, ...] = (256, 256, 512, 256)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, 128)) for width in widths
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


CAPTURED = remembered(Deep(), (torch.randn(16, 128),))


def cluster(memory: str = "16 GiB", bandwidth: str = "1 Gbit/s") -> ClusterSpec:
    """Return four CPU hosts of one rank each."""
    return ClusterSpec.from_dict({
        "version": 1,
        "name": "four",
        "devices": {"core": {"preset": "cpu", "memory": {"capacity": memory, "reserved": "0 B"}}},
        "nodes": {"host": {"device": "core", "count": 1, "nic": {"bandwidth": bandwidth, "latency": "100us"}}},
        "groups": [{"node": "host", "count": 4}],
    })  # fmt: skip


def planned(spec: ClusterSpec, **options: object) -> Plan:
    return plan_captured(CAPTURED, "Deep", spec, PlanOptions.parse(**options), Silent())


@pytest.mark.parametrize("memory", [pytest.param("16 GiB", marks=pytest.mark.slow), "8 MiB"])
def test_the_free_plan_is_no_slower_than_any_choice_of_degrees(memory: str):
    spec = cluster(memory)
    free = planned(spec, memory_margin=0.0, gap=0.0)
    times = {}
    for depth, size, recompute in product((1, 2, 4), (1, 4), ("none", "full")):
        fix = {"pp": depth, "microbatch": size, "recompute": recompute}
        try:
            times[depth, size, recompute] = planned(spec, fix=fix, memory_margin=0.0, gap=0.0).estimates.step_time_s
        except (InfeasibleError, UsageError):
            continue

    assert times
    # A plan with fewer parts is taken where it is as fast within two per cent.
    assert free.estimates.step_time_s <= 1.02 * min(times.values()), times
    assert free.solver.bound <= min(times.values()) * (1 + 1e-9)


@pytest.mark.parametrize("depth", [1, 2])
def test_mfu_counts_what_the_model_computes_and_nothing_that_runs_again(depth: int):
    fix = {"pp": depth, "microbatch": 4}
    kept, again = (planned(cluster(), fix={**fix, "recompute": way}) for way in ("none", "full"))

    assert again.decisions.recompute == {"*": "full"}
    work = [plan.estimates.mfu * plan.estimates.step_time_s for plan in (kept, again)]
    assert work[1] == pytest.approx(work[0])


def test_the_smallest_plan_is_taken_if_it_fits_where_the_search_saw_none_that_does(monkeypatch: pytest.MonkeyPatch):
    """It was refused, for needing less than the budget: rows of memory count more than plans hold."""

    def too_large(solving: Solving, trial: Trial, *_: object) -> Solved:
        return Solved(trial, Solution("infeasible", (), inf, inf), why_not="does not fit in memory")

    monkeypatch.setattr(Solving, "bound", too_large)

    found = planned(cluster(), fix={"dp_shard": 4, "microbatch": 4})

    assert found.estimates.peak_memory_bytes <= found.estimates.memory_budget_bytes
    assert 0.0 < found.solver.bound < found.estimates.step_time_s


def test_degrees_that_are_forbidden_or_fixed_hold():
    spec = cluster()

    assert planned(spec, forbid=("pp",)).decisions.degrees["pp"] == 1
    assert planned(spec, fix={"schedule": "none"}).decisions.degrees["pp"] == 1
    assert planned(spec, fix={"schedule": "gpipe"}).decisions.schedule.name == "gpipe"
    assert planned(spec, fix={"interleave": 2}).decisions.schedule.interleave == 2


def test_a_model_that_returns_no_loss_is_planned_whole():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    captured = remembered(model, (torch.randn(16, 64),))
    plan = plan_captured(captured, "net", cluster(), PlanOptions.parse(), Silent())

    assert plan.decisions.degrees["pp"] == 1
    with pytest.raises(InfeasibleError, match="returns its loss, one scalar"):
        plan_captured(captured, "net", cluster(), PlanOptions.parse(fix={"pp": 2}), Silent())


def test_memory_of_stages_is_that_of_the_ranks_that_run_them():
    """Rows and curve say the same, and sum up to the whole program's where a rank holds one micro-batch."""
    options = PlanOptions.parse(memory_margin=0.0)
    planner = Planner(Program(CAPTURED.graph, "Deep", "2.13"), cluster(), options)
    solving = Solving(CAPTURED.graph, planner.cluster, options)
    wishes = read_wishes(options)
    trial = Trial((MeshAxis("microbatch", 4), MeshAxis("dp_shard", 2)), depth=2)
    _, pricing = solving.price(trial, wishes)
    graph = CAPTURED.graph
    split = Split(stage_of(graph, [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]]), (0, 1), (2, 1))
    staged = pricing.staged(split)
    chosen = tuple(0 for _ in staged.table.nodes)
    copies = [set() for _ in staged.table.groups]
    curve = staged.table.memory_curve(chosen, copies)

    for at in range(0, len(curve), 7):
        row = staged.table.memory_row(at)
        held = row.fixed_bytes + sum(options_[0] for options_ in row.nodes.values())
        assert held == pytest.approx(curve[at]), at
    single = pricing.staged(Split(split.stage_of, (0, 1), (1, 1)))
    alone = single.table.memory_curve(chosen, copies)
    assert (alone <= curve).all()
    assert (alone < curve).any()


def test_meshes_that_no_node_divides_into_are_left_out():
    spec = ClusterSpec.parse("a100-sxm-80gb:8x3")
    plan = plan_captured(CAPTURED, "Deep", spec, PlanOptions.parse(), Silent())

    assert plan.decisions.mesh.world_size * plan.decisions.degrees["pp"] == 24
    assert plan.decisions.degrees["tp"] in {1, 2, 4, 8}


def outer(**options: object) -> Outer:
    parsed = PlanOptions.parse(**options)
    standing = Standing(Solving(CAPTURED.graph, cluster(), parsed), read_wishes(parsed), mixes=True)
    return Outer(standing, Silent())


@pytest.mark.parametrize(("slack", "kept"), [(1.3, True), (1.1, False)])
def test_time_is_kept_for_recomputing_less_where_that_may_lead_to_the_best_plan(
    slack: float, kept: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    search, best = outer(time_limit=1000), Trial((MeshAxis("tp", 4),))
    search.standing.started = 0.0
    heavy = Trial((MeshAxis("dp_shard", 4),), recompute="full")
    search.standing.estimates._mixed = {heavy: slack}
    for trial, step_s in ((best, 1.0), (heavy, 1.2)):
        search.standing.solved.append(Solved(trial, Solution("gap", (0,), step_s, step_s), Mock(), step_s))

    assert search.standing.left_s == pytest.approx(800)
    assert search.standing.left_to_try_s == pytest.approx(650 if kept else 800)


@pytest.mark.parametrize(("bound_s", "solved"), [(1.05, True), (1.15, False)])
def test_what_may_recompute_less_is_solved_if_it_may_become_faster_than_what_others_may(bound_s: float, solved: bool):
    """The best takes 1.0 as it is, another may come from 1.2 to 0.92: 1.05 may come to 0.88, and 1.15 to 0.96."""
    search, one = outer(), Trial((MeshAxis("dp_shard", 4),), recompute="full")
    best, heavy = Trial((MeshAxis("tp", 4),)), Trial((MeshAxis("dp_replicate", 4),), recompute="full")
    search.standing.estimates._mixed = {heavy: 1.3, one: 1.2}
    for trial, step_s in ((best, 1.0), (heavy, 1.2)):
        search.standing.solved.append(Solved(trial, Solution("gap", (0,), step_s, step_s), Mock(), step_s))
    found = Solved(one, Solution("gap", (0,), bound_s, bound_s), Mock(), bound_s)
    search.standing.solving = Mock(wraps=search.standing.solving)
    search.standing.solving.options = PlanOptions.parse()
    search.standing.solving.solve = lambda *_: found

    search._solve(Waiting(one, Mock(), Mock(), Mock(), bound_s, 0.0), 1, 1, 1)

    assert (search.standing.solved[-1] is found) == solved


@pytest.mark.parametrize(("known_s", "relaxed"), [(1.05, True), (1.15, False)])
def test_what_would_not_be_solved_is_not_relaxed_either(known_s: float, relaxed: bool):
    """As above; its relaxation bounds it by no less than what is known of it before."""
    search, one = outer(), Trial((MeshAxis("dp_shard", 4),), recompute="full")
    best, heavy = Trial((MeshAxis("tp", 4),)), Trial((MeshAxis("dp_replicate", 4),), recompute="full")
    search.standing.likely = {one: 1.0}
    search.standing.estimates._mixed = {heavy: 1.3, one: 1.2}
    for trial, step_s in ((best, 1.0), (heavy, 1.2)):
        search.standing.solved.append(Solved(trial, Solution("gap", (0,), step_s, step_s), Mock(), step_s))
    search.standing.known_bound_s = lambda trial: known_s if trial == one else 0.0  # type: ignore[method-assign]
    search.standing.relax = Mock(return_value=None)  # type: ignore[method-assign]

    search._best_first([one], "bound", 1)

    assert search.standing.relax.called == relaxed


def test_of_trials_that_are_bounded_the_least_bound_is_solved_first():
    """Not what recomputing less might lead to: time may end before that is tried."""
    search, solved = outer(), []
    hoped = Trial((MeshAxis("microbatch", 4), MeshAxis("tp", 2)), 2, "full")
    plain = Trial((MeshAxis("dp_shard", 4),), 1, "full")
    bounds = {hoped: 1.2, plain: 1.0}

    def solve(one: Waiting, *_: object) -> Solved:
        solved.append(one.trial)
        return Solved(one.trial, Solution("gap", (0,), one.bound_s, one.bound_s), Mock(), one.bound_s)

    search.standing.likely = {hoped: 0.8, plain: 0.9}
    search.standing.estimates._mixed = {hoped: 1.5, plain: 1.1}
    search.standing.solving = Mock(wraps=search.standing.solving)
    search.standing.solving.options = PlanOptions.parse()
    search.standing.solving.bound = lambda trial, *_: Waiting(trial, Mock(), Mock(), Mock(), bounds[trial], 0.0)
    search.standing.solving.solve = solve
    search._ways = lambda _: []  # type: ignore[method-assign]

    search._best_first([hoped, plain], "bound", 2)

    assert solved == [plain, hoped]


@pytest.mark.parametrize(
    ("spent_s", "wanted"),
    [(100.0, ["bound 0", "bound 1", "solve 1", "solve 0"]), (500.0, ["bound 0", "solve 0", "bound 1", "solve 1"])],
)
def test_late_without_a_plan_what_is_bounded_is_solved_before_more_is_bounded(
    spent_s: float, wanted: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("time.process_time", lambda: spent_s)
    search, done = outer(time_limit=1000), []
    search.standing.started = 0.0
    trials = [Trial((MeshAxis("dp_shard", 4),), 1, "full"), Trial((MeshAxis("tp", 4),), 1, "full")]
    search.standing.likely = {trials[0]: 0.8, trials[1]: 0.9}

    def bound(trial: Trial, *_: object) -> Waiting:
        done.append(f"bound {trials.index(trial)}")
        return Waiting(trial, Mock(), Mock(), Mock(), 1.2 - 0.1 * trials.index(trial), 0.0)

    def solve(one: Waiting, *_: object) -> Solved:
        done.append(f"solve {trials.index(one.trial)}")
        return Solved(one.trial, Solution("infeasible", (), inf, one.bound_s))

    search.standing.solving = Mock(wraps=search.standing.solving)
    search.standing.solving.options, search.standing.solving.bound, search.standing.solving.solve = (
        PlanOptions.parse(time_limit=1000),
        bound,
        solve,
    )

    search._best_first(trials, "bound", 2)

    assert done == wanted


@pytest.mark.parametrize(("degrees", "pipelines"), [({"pp": 2}, "1, 3, 6, 12, 24"), ({"pp": 2, "tp": 4}, "1, 3, 6")])
def test_stages_that_reach_into_a_node_are_told_with_numbers_of_stages_that_do_not(
    degrees: dict[str, int], pipelines: str
):
    spec, captured = ClusterSpec.parse("h100-sxm-80gb:8x3"), remembered(Deep(), (torch.randn(24, 128),))

    with pytest.raises(InfeasibleError) as caught:
        plan_captured(captured, "Deep", spec, PlanOptions.parse(fix=degrees), Silent())

    assert str(caught.value) == (
        "--fix pp=2 leaves 12 of 24 devices to each stage, and nodes come in 8s: a stage would have all of one "
        "node and part of another, so that links between its ranks differ; take "
        f"pp={pipelines}, or nodes whose number divides by 2"
    )


def test_trials_given_up_are_bounded_by_what_was_relaxed_since():
    """A proof is as good as its worst bound, and time may end before each trial had its own."""
    search, mesh = outer(), (MeshAxis("dp_shard", 4),)
    free = Trial((MeshAxis("free", 4),))
    given_up, faster, hopeless = Trial(mesh, 1, "full"), Trial(mesh), Trial(mesh, 2)
    search.standing.solved = [
        Solved(given_up, Solution("cutoff", (), inf, 0.0)),
        Solved(faster, Solution("gap", (0,), 0.7, 0.2), Mock(), 0.7),
        Solved(hopeless, Solution("infeasible", (), inf, inf)),
    ]
    search.standing.learn(free, 0.75)

    raise_bounds(search.standing)

    assert [one.solution.bound_s for one in search.standing.solved] == [0.75, 0.7, inf]


def test_what_does_not_fit_bounds_what_recomputes_more_on_its_mesh():
    options = PlanOptions.parse(memory_margin=0.0)
    solving = Solving(CAPTURED.graph, cluster("2 MiB"), options)
    search = Standing(solving, read_wishes(options), mixes=True)
    mesh = (MeshAxis("dp_replicate", 4),)

    assert search.relax(Trial(mesh)) is None

    assert search.solved[0].solution.status == "infeasible"
    assert 0.0 < search.known_bound_s(Trial(mesh, recompute="full")) < inf


def test_sizes_of_micro_batches_near_the_best_are_tried_once_though_their_estimates_are_slow():
    search, tried = outer(), []
    near, best = (Trial((MeshAxis("microbatch", count), MeshAxis("dp_shard", 4))) for count in (2, 4))
    search.standing.solved.append(Solved(best, Solution("gap", (0,), 1.0, 1.0), Mock(), 1.0))
    search.standing.likely = {best: 0.5, near: 9.0}
    search._near = lambda _: [near]  # type: ignore[method-assign]
    search.standing.estimates.more = lambda trials, *, fits: dict.fromkeys(trials, 9.0)  # type: ignore[method-assign]
    search.standing.relax = lambda trial, _: tried.append(trial)  # type: ignore[method-assign,func-returns-value]

    search._climb()

    assert tried == [near]


@pytest.mark.parametrize(("bound_s", "relaxed"), [(0.8, True), (0.995, False)])
def test_what_only_its_estimate_is_against_is_relaxed_in_the_end(bound_s: float, relaxed: bool):
    """Its estimate is three times the best plan's seconds; a bound within the gap of them proves it no better."""
    search = outer()
    slow, best = (Trial((MeshAxis("microbatch", count), MeshAxis("dp_shard", 4))) for count in (2, 4))
    search.standing.solved.append(Solved(best, Solution("gap", (0,), 1.0, 1.0), Mock(), 1.0))
    search.standing.likely = {slow: 3.0}
    search.standing.fluid_of = lambda _: Mock(step_s=bound_s)  # type: ignore[method-assign]
    search.standing.relax = Mock(return_value=None)  # type: ignore[method-assign]
    assert search.standing.is_unlikely(slow)
    search.standing.give_up([slow])

    search._look_again(6, 2)

    assert search.standing.relax.called == relaxed


@pytest.mark.parametrize(("relaxed", "solutions"), [(0, 2), (6, 0)])
def test_what_estimates_are_against_is_left_where_numbers_are_used_up(relaxed: int, solutions: int):
    search = outer()
    slow, best = (Trial((MeshAxis("microbatch", count), MeshAxis("dp_shard", 4))) for count in (2, 4))
    search.standing.solved.append(Solved(best, Solution("gap", (0,), 1.0, 1.0), Mock(), 1.0))
    search.standing.likely = {slow: 3.0}
    search.standing.relax = Mock(return_value=None)  # type: ignore[method-assign]
    search.standing.give_up([slow])

    search._look_again(relaxed, solutions)

    assert not search.standing.relax.called
    assert [one.trial for one in search.standing.solved] == [best, slow]


@pytest.mark.parametrize(("off", "unlikely"), [(0.8, False), (0.95, True), (None, True)])
def test_an_estimate_that_is_too_slow_for_its_kind_is_corrected(off: float | None, unlikely: bool):
    """1.3 times the best plan's seconds, of a kind whose plans were faster than estimated."""
    standing = outer().standing
    one, known, best = (
        Trial((MeshAxis("microbatch", count), MeshAxis(role, 4)))
        for count, role in ((2, "dp_shard"), (4, "dp_shard"), (4, "tp"))
    )
    standing.likely = {one: 1.3} if off is None else {one: 1.3, known: 1.2 / off}
    for trial, step_s in ((best, 1.0), (known, 1.2)):
        standing.solved.append(Solved(trial, Solution("gap", (0,), step_s, step_s), Mock(), step_s))

    assert standing.is_unlikely(one) == unlikely


def test_what_takes_too_long_to_relax_leaves_time_for_others_and_is_solved_last(monkeypatch: pytest.MonkeyPatch):
    """Its bound is low for want of time; the other, which takes none, is solved before it."""
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    search, done = outer(time_limit=1000), []
    search.standing.started = 0.0
    slow, quick = Trial((MeshAxis("free", 4),)), Trial((MeshAxis("dp_replicate", 4),))

    def bound(trial: Trial, _: object, left_s: float) -> Waiting:
        done.append(left_s)
        return Waiting(trial, Mock(), Mock(), Mock(), 0.5 if trial == slow else 1.0, 0.0, ended=trial != slow)

    def solve(one: Waiting, *_: object) -> Solved:
        done.append(one.trial)
        return Solved(one.trial, Solution("gap", (0,), one.bound_s, one.bound_s), Mock(), 1.0)

    search.standing.solving = Mock(wraps=search.standing.solving)
    search.standing.solving.options = PlanOptions.parse(time_limit=1000)
    search.standing.solving.bound, search.standing.solving.solve = bound, solve

    search._best_first([slow, quick], "bound", 2)

    assert done == [pytest.approx(160.0), pytest.approx(160.0), quick, slow]


@pytest.mark.parametrize(
    ("taken_s", "order", "last_room_s"), [(100.0, [0, 1, "others"], 0.2 * 700), (500.0, [0, "others", 1], 300)]
)
def test_with_a_plan_the_whole_program_leaves_half_of_the_time_to_others(
    taken_s: float, order: list[object], last_room_s: float, monkeypatch: pytest.MonkeyPatch
):
    """Of 800 s for trials; what waited is solved in the end, and only then may the last one take what is left."""
    clock, done, rooms = [0.0], [], []
    monkeypatch.setattr("time.process_time", lambda: clock[0])
    search = outer(time_limit=1000)
    search.standing.started = 0.0
    trials = [Trial((MeshAxis(role, 4),)) for role in ("dp_shard", "tp")]

    def solve(one: Waiting, *more: object) -> Solved:
        clock[0] += taken_s
        done.append(trials.index(one.trial))
        rooms.append(more[-1])
        return Solved(one.trial, Solution("gap", (0,), 1.0, one.bound_s), Mock(), 1.0)

    search.standing.solving = Mock(wraps=search.standing.solving)
    search.standing.solving.options = PlanOptions.parse(time_limit=1000)
    search.standing.solving.program.batch_size = 16
    search.standing.solving.bound = lambda trial, *_: Waiting(trial, Mock(), Mock(), Mock(), 0.5, 0.0)
    search.standing.solving.solve = solve
    search._run_others = lambda _: done.append("others")  # type: ignore[method-assign]
    search._lighten = lambda _: False  # type: ignore[method-assign]
    monkeypatch.setattr("autopar.api.outer.prove", lambda _: None)

    search.run(trials, [Trial((MeshAxis("microbatch", 2), MeshAxis("tp", 4)))])

    assert done == order
    assert rooms[-1] == pytest.approx(last_room_s)


def test_without_a_plan_one_of_several_leaves_most_of_the_time_to_others_and_nothing_is_proven(
    monkeypatch: pytest.MonkeyPatch,
):
    """What takes all the time and finds nothing would leave none for those that are quick."""
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    search, rooms = outer(time_limit=1000), []
    search.standing.started = 0.0

    def solve(one: Waiting, *more: object) -> Solved:
        rooms.append(more[-1])
        return Solved(one.trial, Solution("time_limit", (), inf, one.bound_s))

    search.standing.solving = Mock(wraps=search.standing.solving)
    search.standing.solving.options = PlanOptions.parse(time_limit=1000)
    search.standing.solving.program.batch_size = 16
    search.standing.solving.bound = lambda trial, *_: Waiting(trial, Mock(), Mock(), Mock(), 0.5, 0.0)
    search.standing.solving.solve = solve
    search._run_others = lambda _: None  # type: ignore[method-assign]
    monkeypatch.setattr("autopar.api.outer.prove", lambda _: rooms.append("proven"))

    search.run([Trial((MeshAxis(role, 4),)) for role in ("dp_shard", "tp")], [Trial((MeshAxis("tp", 4),), depth=2)])

    assert search.standing.is_late
    assert rooms == [pytest.approx(0.35 * 800), pytest.approx(0.35 * 800)]  # others wait for what is left
