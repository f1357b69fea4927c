"""The integer program against exhaustive search, on small random tables."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import highspy
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.costs.timing import hidden_at_ends_s, pairs, timing
from autopar.ir.table import CostTable, Demand, Floats, Group, MemoryRow, Node
from autopar.search.fitting import smallest_peak, solve
from autopar.search.ilp import Ilp, Limits, Solution, _run, memory_curve

FORWARD, SEGMENTS, POSITIONS = 2, 4, 3


def make_table(rng: np.random.Generator, nodes: int, groups: int, microbatches: int = 1) -> CostTable:
    counts = rng.integers(1, 4, size=nodes)
    made = [
        Node(f"n{i}", rng.random((k, SEGMENTS)) * (rng.random(SEGMENTS) < 0.5), rng.random(k) * 0.1)
        for i, k in enumerate(counts)
    ]
    links = [make_group(rng, counts, microbatches) for _ in range(groups)] if nodes > 1 else []
    held = rng.random((POSITIONS, nodes, 3))
    copied = [rng.random((POSITIONS, *group.price_s.shape)) for group in links]

    def row(at: int) -> MemoryRow:
        return MemoryRow(
            at,
            0.5,
            {i: held[at, i, : counts[i]] for i in range(nodes)},
            {g: np.where(group.price_s > 0, copied[g][at], 0.0) for g, group in enumerate(links)},
        )

    def curve(options: tuple[int, ...], copies: object) -> Floats:
        del copies
        return np.array([bytes_of(row(at), links, options) for at in range(POSITIONS)])

    return CostTable(tuple(made), tuple(links), FORWARD, SEGMENTS, row, curve, microbatches)


def make_group(rng: np.random.Generator, counts: np.ndarray, microbatches: int) -> Group:
    nodes = rng.permutation(len(counts))
    source, readers = int(nodes[0]), nodes[1 : 1 + int(rng.integers(1, 3))]
    price = rng.random((2, 2)) * (1 - np.eye(2))
    category = ("critical", "reduction", "prefetch")[int(rng.integers(3))]
    hidden = np.zeros((2, 2)) if category == "critical" else price * 0.75
    ends = None
    if microbatches > 1 and category != "critical" and rng.random() < 0.7:  # once a step
        ends, hidden = hidden, np.zeros((2, 2))
    if rng.random() < 0.2:
        price[0, 1] = hidden[0, 1] = np.inf
    spread = np.zeros(SEGMENTS)
    spread[int(rng.integers(SEGMENTS))] = int(rng.integers(1, 3))
    return Group(
        "g",
        source,
        rng.integers(0, 2, size=counts[source]),
        tuple(Demand(int(r), rng.integers(0, 2, size=counts[r])) for r in readers),
        price,
        hidden,
        category,
        spread,
        ends,
    )


def bytes_of(row: MemoryRow, groups: list[Group], options: tuple[int, ...]) -> float:
    held = row.fixed_bytes + sum(values[options[node]] for node, values in row.nodes.items())
    return held + sum(row.groups[g][pair] for g, group in enumerate(groups) for pair in pairs(group, options))


def seconds(table: CostTable, options: tuple[int, ...]) -> float:
    return timing(table, options).step_s - hidden_at_ends_s(table, options)


def exhaustive(table: CostTable, budget: float) -> float:
    best = np.inf
    for options in itertools.product(*(range(node.options) for node in table.nodes)):
        if table.memory_curve(options, []).max() <= budget:
            best = min(best, seconds(table, options))
    return float(best)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 6), st.floats(1.0, 8.0), st.sampled_from([1, 2, 5]))
def test_the_integer_program_finds_what_exhaustive_search_finds(
    seed: int, nodes: int, groups: int, budget: float, microbatches: int
) -> None:
    table = make_table(np.random.default_rng(seed), nodes, groups, microbatches)

    found = solve(table, Limits(memory_bytes=budget))

    best = exhaustive(table, budget)
    if np.isinf(best):
        assert found.status == "infeasible"
    else:
        assert found.objective_s == pytest.approx(best, rel=1e-6, abs=1e-9)
        assert seconds(table, found.options) == pytest.approx(best, rel=1e-6, abs=1e-9)
        assert found.bound_s <= best + 1e-9
        assert found.peak_bytes <= budget


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 6), st.floats(1.0, 8.0), st.floats(0.0, 0.5))
def test_what_is_found_is_within_the_gap_that_is_allowed_and_fits(
    seed: int, nodes: int, groups: int, budget: float, gap: float
) -> None:
    table = make_table(np.random.default_rng(seed), nodes, groups)

    found = solve(table, Limits(memory_bytes=budget, gap=gap))

    best = exhaustive(table, budget)
    assert bool(found.options) == np.isfinite(best)
    if found.options:
        assert best * (1 - 1e-6) - 1e-9 <= found.objective_s <= best / (1 - gap) * (1 + 1e-6) + 1e-9
        assert found.bound_s <= best * (1 + 1e-6) + 1e-9
        assert found.peak_bytes == table.memory_curve(found.options, []).max() <= budget


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1.0, 6.0), st.floats(0.0, 2.0))
def test_what_fits_because_values_are_freed_early_is_found(seed: int, budget: float, freed: float):
    table = make_table(np.random.default_rng(seed), 5, 3)
    fastest = solve(table, Limits(memory_bytes=np.inf))
    assume(fastest.options)
    held = table.memory_curve(fastest.options, []).max()
    less = {fastest.options: np.full(POSITIONS, max(0.0, held - budget) + freed + 1e-9)}
    early = replace(table, freed=lambda options: less.get(options, np.zeros(POSITIONS)))

    found = solve(early, Limits(memory_bytes=budget))

    assert found.objective_s == pytest.approx(fastest.objective_s, rel=1e-6, abs=1e-9)
    assert found.peak_bytes <= budget
    assert smallest_peak(early, Limits(memory_bytes=budget)).options


def test_an_assignment_that_is_as_good_as_the_relaxation_needs_no_integer_program(monkeypatch: pytest.MonkeyPatch):
    table = make_table(np.random.default_rng(0), 5, 0)

    def solved(*args: object) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(Ilp, "solve", solved)
    found = solve(table, Limits(memory_bytes=1e9))

    assert found.status == "optimal"
    assert found.objective_s == pytest.approx(exhaustive(table, 1e9))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Limits]:
    """Return a list that grows by the limits of each whole integer program that is solved from here on."""
    solved: list[Limits] = []
    whole = Ilp.solve

    def solve_whole(program: Ilp, limits: Limits, *more: object) -> Solution:
        solved.append(limits)
        return whole(program, limits, *more)

    monkeypatch.setattr(Ilp, "solve", solve_whole)
    return solved


@pytest.mark.parametrize(
    ("seed", "gap", "wholes"),
    [
        pytest.param(2, 0.0, 1, id="not as good as the relaxation"),
        pytest.param(2, 0.02, 0, id="within the gap of the relaxation"),
        pytest.param(385, 0.02, 1, id="what the whole program finds does not fit"),
    ],
)
def test_whole_programs_are_solved_only_for_what_is_not_near_their_relaxation(
    monkeypatch: pytest.MonkeyPatch, seed: int, gap: float, wholes: int
) -> None:
    table, budget = make_table(np.random.default_rng(seed), 8, 8), 7.0
    solved = counted(monkeypatch)

    found = solve(table, Limits(memory_bytes=budget, gap=gap))

    assert len(solved) == wholes
    assert found.peak_bytes <= budget
    assert found.bound_s <= exhaustive(table, budget) * (1 + 1e-6) <= found.objective_s * (1 + 2e-6)
    assert found.objective_s - found.bound_s <= gap * found.objective_s + 1e-6


@pytest.mark.parametrize("late", [False, True], ids=["found nothing in time", "had no time"])
def test_what_fits_near_the_relaxation_is_kept_where_time_ends(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """The first table of those above: an assignment near the relaxation fits, and is not as good as that."""
    table, clock = make_table(np.random.default_rng(2), 8, 8), [0.0]
    monkeypatch.setattr("autopar.search.fitting.time.process_time", lambda: clock[0])
    near = Ilp.near

    def found_near(program: Ilp, *given: Any, **how: Any) -> Any:
        found = near(program, *given, **how)
        if late and found and memory_curve(table, found[0].options, program.copies(found[0].options)).max() <= 7.0:
            clock[0] = 61.0
        return found

    def whole(*_: object) -> Solution:
        assert not late
        return Solution("time_limit", (), np.inf, 0.0)

    monkeypatch.setattr(Ilp, "near", found_near)
    monkeypatch.setattr(Ilp, "solve", whole)

    found = solve(table, Limits(memory_bytes=7.0, gap=0.0, seconds=60.0))

    assert found.status == "time_limit"
    assert found.options
    assert found.peak_bytes <= 7.0
    assert found.bound_s < found.objective_s


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 6), st.floats(1.0, 8.0))
def test_rows_added_to_a_running_relaxation_bound_as_much_as_from_the_start(
    seed: int, nodes: int, groups: int, budget: float
) -> None:
    table = make_table(np.random.default_rng(seed), nodes, groups)
    program = Ilp(table)

    found = program.relaxed(Limits(memory_bytes=budget))

    from_the_start = program.relaxed(Limits(memory_bytes=budget))
    assert found.bound_s == pytest.approx(from_the_start.bound_s, rel=1e-6, abs=1e-9)
    assert found.free_s <= found.bound_s * (1 + 1e-6) + 1e-9
    assert found.bound_s <= exhaustive(table, budget) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_a_relaxation_that_is_stopped_still_bounds(monkeypatch: pytest.MonkeyPatch, seed: int):
    table = make_table(np.random.default_rng(seed), 5, 5)
    whole = Ilp.relaxation

    def stopped(program: Ilp, limits: Limits) -> Any:
        solver = whole(program, limits)
        solver.setOptionValue("presolve", "off")
        solver.setOptionValue("simplex_iteration_limit", 0)
        return solver

    full = Ilp(table).relaxed(Limits(memory_bytes=1e9))
    monkeypatch.setattr(Ilp, "relaxation", stopped)

    found = Ilp(table).relaxed(Limits(memory_bytes=1e9))

    assert 0.0 < found.bound_s <= full.bound_s * (1 + 1e-9)
    assert found.free_s == found.bound_s < full.free_s


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(0, 4))
def test_the_smallest_peak_is_that_of_exhaustive_search(seed: int, nodes: int, groups: int) -> None:
    table = make_table(np.random.default_rng(seed), nodes, groups)

    found = smallest_peak(table, Limits(memory_bytes=1.0))

    peaks = [
        table.memory_curve(options, []).max()
        for options in itertools.product(*(range(node.options) for node in table.nodes))
        if np.isfinite(timing(table, options).step_s)
    ]
    if peaks:
        assert found.peak_bytes == pytest.approx(min(peaks), rel=1e-6)
    else:
        assert not found.options


def test_a_table_that_cannot_beat_the_cutoff_is_given_up() -> None:
    table = make_table(np.random.default_rng(7), 4, 3)
    best = exhaustive(table, 100.0)

    found = solve(table, Limits(memory_bytes=100.0, cutoff_s=best * 0.5))

    assert found.status == "cutoff"
    assert not found.options


def test_the_same_seed_gives_the_same_options() -> None:
    table = make_table(np.random.default_rng(3), 6, 6)

    first, second = (solve(table, Limits(memory_bytes=100.0, seed=5)) for _ in range(2))

    assert first == second


class Stalled:
    """A solver that others leave no core: by the clock it takes long, and ends when it is cancelled or has computed."""

    def __init__(self, clock: list[float], computes_s: float) -> None:
        self.clock, self.left, self.cancelled = clock, 5, False
        self.computes_s = computes_s / self.left
        self.options: dict[str, float] = {}

    def setOptionValue(self, name: str, value: float) -> None:  # noqa: N802
        self.options[name] = value

    def getRunTime(self) -> float:  # noqa: N802
        return 7.0

    def getModelStatus(self) -> highspy.HighsModelStatus:  # noqa: N802
        late = self.clock[0] > self.options["time_limit"] - self.getRunTime()
        return highspy.HighsModelStatus.kTimeLimit if late else highspy.HighsModelStatus.kOptimal

    def startSolve(self) -> None:  # noqa: N802
        pass

    def wait(self, _: float) -> list[bool]:
        self.clock[0] += self.computes_s
        self.left -= 1
        return [self.cancelled or self.left == 0]

    def cancelSolve(self) -> None:  # noqa: N802
        self.cancelled = True


@pytest.mark.parametrize(("computes_s", "ended"), [(0.9, "itself"), (9.0, "time_limit")])
def test_what_a_solve_may_take_is_computing_time(monkeypatch: pytest.MonkeyPatch, computes_s: float, ended: str):
    clock = [0.0]
    monkeypatch.setattr("autopar.search.ilp.time.process_time", lambda: clock[0])

    assert _run(Stalled(clock, computes_s), seconds=1.0) == ended


def test_a_solver_that_does_not_listen_ends_by_its_own_clock(monkeypatch: pytest.MonkeyPatch):
    """HiGHS hears nobody while it solves the relaxation at the root: there it ends itself, which is no solution."""
    clock = [0.0]
    monkeypatch.setattr("autopar.search.ilp.time.process_time", lambda: 0.0)
    deaf = Stalled(clock, computes_s=20.0)

    assert _run(deaf, seconds=1.0) == "time_limit"
    assert 1.0 < deaf.options["time_limit"] - deaf.getRunTime() < 5.0


def test_without_time_left_nothing_near_a_relaxation_is_searched_for(monkeypatch: pytest.MonkeyPatch):
    program, limits = Ilp(make_table(np.random.default_rng(1), 6, 6)), Limits(memory_bytes=np.inf)
    monkeypatch.setattr(highspy.Highs, "setSolution", lambda *_: pytest.fail("a start was given"))
    relaxation = program.relaxation(limits)
    start = program.near(relaxation, limits)

    assert start is not None
    assert program.near(relaxation, replace(limits, seconds=-1.0), start=start[1]) is None


def test_an_interrupted_relaxation_interrupts_the_search(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autopar.search.ilp._run", lambda *_: "interrupted")

    with pytest.raises(KeyboardInterrupt):
        Ilp(make_table(np.random.default_rng(0), 3, 2)).relaxed(Limits(memory_bytes=100.0))


def test_a_relaxation_without_time_says_so_and_bounds_by_what_no_data_moved_takes(monkeypatch: pytest.MonkeyPatch):
    table = make_table(np.random.default_rng(0), 3, 2)
    fastest_s = sum((node.seconds.sum(axis=1) + node.optimizer_s).min() for node in table.nodes)
    assert Ilp(table).relaxed(Limits(memory_bytes=np.inf)).ended
    monkeypatch.setattr("autopar.search.ilp._run", lambda *_: "time_limit")

    found = Ilp(table).relaxed(Limits(memory_bytes=np.inf))

    assert not found.ended
    assert found.bound_s == found.free_s == pytest.approx(fastest_s)
