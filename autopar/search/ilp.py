"""One cost table to the best assignment of options, with a proven bound.

Variables: one-hot `x[node, option]`, integer; for each reader of a value, the
pair of layouts `y[source layout, demanded layout]` that its redistribution
leads between, continuous, with both marginals equal to the `x`; where several
readers share copies, `z >= y` of each reader, paid once. On such graphs the
relaxation is nearly integral.

The objective is time, not a sum of costs: reductions run behind the
computation that follows them and prefetches behind what precedes, so the
backward pass takes at least

    (computation up to segment s) + (reductions made in s or later)    for every s

and the forward pass likewise for prefetches. What runs once a step of several
micro-batches is part of that computation, less what one of them hides: no more
than can hide, and no more than its nodes take. Memory is bounded at the peak
points of the program only; points are added until none is violated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import highspy
import numpy as np

from autopar.ir.table import CostTable, Floats, Group, MemoryRow
from autopar.search.highs import QuietHighs

_MEMORY_ROUNDS = 4
"""Relaxations solved at most to find the peaks that matter."""

_UNUSED = 1e-9
"""What the relaxation takes of an option at most that it does not use."""

_TIED = 1e-9
"""Share of the relaxation's objective that an option adds at most which it could as well have taken."""

_SHORTEST_S, _CLOCK, _GRACE_S = 0.1, 2.0, 0.5
"""Seconds of computing that a solver gets at least, and the time of the clock it gets: so many of them, and some."""

Status = Literal["optimal", "gap", "time_limit", "infeasible", "cutoff", "interrupted"]

_Ended = Literal["itself", "time_limit", "interrupted"]
"""What ended a run of the solver."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a solve may take, and what it must beat."""

    memory_bytes: float
    seconds: float = 60.0
    """Of computing, not of the clock."""

    gap: float = 0.0
    seed: int = 0
    cutoff_s: float = np.inf
    """Solutions slower than this are of no interest; a table that has none better is given up early."""


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment of one option to every node."""

    status: Status
    options: tuple[int, ...]
    objective_s: float
    bound_s: float
    peak_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Relaxed:
    """What relaxations prove of a table."""

    bound_s: float
    """No assignment that fits in memory is faster; infinite if none fits."""

    free_s: float
    """No assignment is faster, were memory no limit."""

    ended: bool = True
    """Whether time was enough; else both are what no data moved takes."""


@dataclass
class _Model:
    """Rows and columns under construction, in coordinate form."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def add_columns(self, count: int, *, cost: float = 0.0, upper: float = np.inf, integer: bool = False) -> int:
        """Add columns alike and return the first one's number."""
        first = len(self.cost)
        self.cost += [cost] * count
        self.upper += [upper] * count
        self.integer += [integer] * count
        return first

    def add_row(self, low: float, high: float) -> int:
        """Add an empty row and return its number."""
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1

    def put(self, row: int, columns: Sequence[int], values: Sequence[float]) -> None:
        """Put coefficients into a row."""
        self.row += [row] * len(columns)
        self.column += columns
        self.value += values


@dataclass
class Ilp:
    """The integer program of one table; memory rows are added as they are found violated."""

    table: CostTable
    _model: _Model = field(init=False, default_factory=_Model)
    _x: list[int] = field(init=False, default_factory=list)
    _pairs: list[dict[tuple[int, int], int]] = field(init=False, default_factory=list)
    """For each group, the column that says whether a copy leads from source layout i to layout j."""

    _rows: set[int] = field(init=False, default_factory=set)
    """Positions that have a memory row."""

    _used: Floats | None = field(init=False, default=None)
    """The most that relaxations took of each column: what fits is often between those with and without a row."""

    def __post_init__(self) -> None:
        model, table = self._model, self.table
        for node in table.nodes:
            first = model.add_columns(node.options, upper=1.0, integer=True)
            self._x.append(first)
            one = model.add_row(1.0, 1.0)
            model.put(one, list(range(first, first + node.options)), [1.0] * node.options)
        for group in table.groups:
            self._pairs.append(self._add_group(group))
        self._add_time()

    def _add_group(self, group: Group) -> dict[tuple[int, int], int]:
        model = self._model
        per_reader = [self._add_reader(group, number) for number in range(len(group.demands))]
        if len(per_reader) == 1:
            return per_reader[0]
        shared: dict[tuple[int, int], int] = {}
        for pair in sorted({pair for columns in per_reader for pair in columns if group.price_s[pair] > 0}):
            shared[pair] = model.add_columns(1, upper=1.0)
            for columns in per_reader:
                if pair in columns:
                    row = model.add_row(0.0, np.inf)
                    model.put(row, [shared[pair], columns[pair]], [1.0, -1.0])
        return shared

    def _add_reader(self, group: Group, number: int) -> dict[tuple[int, int], int]:
        model, demand = self._model, group.demands[number]
        sources, targets = _options_by_layout(group.layout), _options_by_layout(demand.layout)
        columns: dict[tuple[int, int], int] = {}
        for i in sources:
            for j in targets:
                if np.isfinite(group.price_s[i, j]):
                    columns[i, j] = model.add_columns(1, upper=1.0)
        for i, options in sources.items():
            self._marginal([c for (a, _), c in columns.items() if a == i], group.source, options)
        for j, options in targets.items():
            self._marginal([c for (_, b), c in columns.items() if b == j], demand.node, options)
        return columns

    def _marginal(self, columns: list[int], node: int, options: list[int]) -> None:
        row = self._model.add_row(0.0, 0.0)
        taken = [self._x[node] + option for option in options]
        self._model.put(row, columns + taken, [1.0] * len(columns) + [-1.0] * len(taken))

    def _add_time(self) -> None:
        """Add the seconds of each segment, and the passes' makespans as the objective."""
        model, table = self._model, self.table
        work = [self._total() for _ in range(table.segments)]
        hidden = [self._total() for _ in range(table.segments)]
        for node, first in zip(table.nodes, self._x, strict=True):
            for segment in range(table.segments):
                self._spread(work[segment], first, node.seconds[:, segment])
            for option in range(node.options):
                model.cost[first + option] += float(node.optimizer_s[option])
        for group, pairs in zip(table.groups, self._pairs, strict=True):
            paid = [pair for pair in pairs if group.price_s[pair] > 0]
            columns = [pairs[pair] for pair in paid]
            behind = np.array([group.hidden_s[pair] for pair in paid])
            open_ = np.array([group.price_s[pair] for pair in paid]) - behind
            for segment in np.flatnonzero(group.counts).tolist():
                self._add(work[segment], columns, group.counts[segment] * open_)
                self._add(hidden[segment], columns, group.counts[segment] * behind)
        phases = (range(table.forward_segments), range(table.forward_segments, table.segments))
        for phase in phases:
            if phase:
                self._makespan(work, hidden, list(phase))
        if table.microbatches > 1:
            for category, phase in zip(("prefetch", "reduction"), phases, strict=True):
                self._add_ends(slice(phase.start, phase.stop), category)

    def _add_ends(self, phase: slice, category: str) -> None:
        """Take off what one micro-batch hides of what runs once a step, at most all that its nodes take."""
        model, table = self._model, self.table
        hides, less = model.add_columns(1, cost=-1.0), model.add_row(-np.inf, 0.0)
        most = model.add_row(-np.inf, 0.0)
        model.put(less, [hides], [1.0])
        model.put(most, [hides], [float(table.microbatches)])
        for node, first in zip(table.nodes, self._x, strict=True):
            spent = -node.seconds[:, phase].sum(axis=1)
            model.put(most, (first + np.flatnonzero(spent)).tolist(), spent[spent != 0.0].tolist())
        for group, pairs in zip(table.groups, self._pairs, strict=True):
            if group.at_end_s is not None and group.category == category:
                once, times = [pair for pair in pairs if group.at_end_s[pair] > 0], group.counts.sum()
                model.put(less, [pairs[p] for p in once], [-float(times * group.at_end_s[p]) for p in once])

    def _total(self) -> tuple[int, int]:
        """Add a column that equals the row that defines it; return row and column."""
        column = self._model.add_columns(1)
        row = self._model.add_row(0.0, 0.0)
        self._model.put(row, [column], [-1.0])
        return row, column

    def _spread(self, total: tuple[int, int], first: int, values: Floats) -> None:
        self._add(total, list(range(first, first + len(values))), values)

    def _add(self, total: tuple[int, int], columns: list[int], values: Floats) -> None:
        used = np.flatnonzero(values)
        self._model.put(total[0], [columns[i] for i in used], values[used].tolist())

    def _makespan(self, work: list[tuple[int, int]], hidden: list[tuple[int, int]], phase: list[int]) -> None:
        """Bound one pass: its reductions trail the work that makes them, its prefetches lead the work that needs them.

        Which of a segment's hidden collectives are reductions and which prefetches is told by the
        phase: forward has prefetches only; in backward both are taken to trail, being of one link.
        """
        model = self._model
        span = model.add_columns(1, cost=1.0)
        forward = phase[0] == 0
        row = model.add_row(0.0, np.inf)
        model.put(row, [span, *(work[s][1] for s in phase)], [1.0] + [-1.0] * len(phase))
        row = model.add_row(0.0, np.inf)
        model.put(row, [span, *(hidden[s][1] for s in phase)], [1.0] + [-1.0] * len(phase))
        for cut in phase:
            before = [s for s in phase if s <= cut]
            after = [s for s in phase if s >= cut]
            first, then = (hidden, work) if forward else (work, hidden)
            columns = [first[s][1] for s in before] + [then[s][1] for s in after]
            row = model.add_row(0.0, np.inf)
            model.put(row, [span, *columns], [1.0] + [-1.0] * len(columns))

    def has_memory_row(self, at: int) -> bool:
        """Return whether memory is bounded at a position already."""
        return at in self._rows

    def minimise_peak(self) -> int:
        """Make the peak of memory rows the objective, in place of time; return its column."""
        self._model.cost = [0.0] * len(self._model.cost)
        return self._model.add_columns(1, cost=1.0)

    def add_memory_row(self, row: MemoryRow, budget_bytes: float, peak: int | None = None) -> None:
        """Demand that what is held at one moment fits the budget, or the column `peak` times the budget."""
        model = self._model
        self._rows.add(row.at)
        scale = 1.0 / budget_bytes
        number = model.add_row(-np.inf, (1.0 if peak is None else 0.0) - row.fixed_bytes * scale)
        if peak is not None:
            model.put(number, [peak], [-1.0])
        for node, held in row.nodes.items():
            columns = [self._x[node] + option for option in range(len(held)) if held[option]]
            model.put(number, columns, [float(h) * scale for h in held if h])
        for group, held in row.groups.items():
            pairs = {pair: column for pair, column in self._pairs[group].items() if held[pair]}
            model.put(number, list(pairs.values()), [float(held[pair]) * scale for pair in pairs])

    def solve(self, limits: Limits, start: Any = None) -> Solution:
        """Return the fastest assignment that this program admits, searched for from a `start` if one is known."""
        solver = self._solver(limits)
        if start is not None:
            solver.setSolution(start)
        return self._read(solver, limits, _run(solver, limits.seconds))

    def relaxation(self, limits: Limits) -> Any:
        """Return a solver of the program's relaxation, yet to be run.

        Without presolve: that takes three quarters of the time (166,504 columns 12.8 s with it, 3.4 s without).
        """
        solver = self._solver(limits)
        solver.setOptionValue("solve_relaxation", True)
        solver.setOptionValue("presolve", "off")
        return solver

    def near(
        self, relaxation: Any, limits: Limits, *, ties: bool = False, start: Any = None
    ) -> tuple[Solution, Any] | None:
        """Return the fastest assignment of options that relaxations took a part of, and its values of all columns.

        `None` if there is none, or time was too short. That takes hundredths of what the program does, and is often as
        good (Berthold, "RENS", 2014). With `ties`, options that would have cost the relaxation nothing may be taken,
        too: a few times as long, and more often as good. A solution without options: no assignment beats the cutoff.
        `start`: the values of an assignment of such options, if one is known.
        """
        until_s = time.process_time() + limits.seconds
        _run_relaxed(relaxation, limits.seconds)
        status = relaxation.getModelStatus()
        bound = float(relaxation.getInfo().objective_function_value)
        solved = status == highspy.HighsModelStatus.kOptimal
        if status == highspy.HighsModelStatus.kInfeasible or (solved and bound >= limits.cutoff_s):
            cut = bool(np.isfinite(limits.cutoff_s))
            return Solution("cutoff" if cut else "infeasible", (), np.inf, limits.cutoff_s if cut else 0.0), None
        if not solved:
            return None
        relaxed = relaxation.getSolution()
        values = np.array(relaxed.col_value)
        self._used = values if self._used is None else np.maximum(self._used, values)
        out = np.array(self._model.integer) & (self._used < _UNUSED)
        if ties:
            out &= np.array(relaxed.col_dual) > _TIED * abs(bound)
        unused = np.flatnonzero(out).astype(np.int32)
        if time.process_time() > until_s:
            return None
        solver = self._solver(limits)
        if start is not None:
            solver.setSolution(start)
        solver.changeColsBounds(len(unused), unused, np.zeros(len(unused)), np.zeros(len(unused)))
        found = self._read(solver, limits, _run(solver, until_s - time.process_time()))
        if not found.options:
            return (found, None) if found.status == "interrupted" else None
        closed = found.objective_s - bound <= 1e-9 * max(1.0, abs(found.objective_s))
        ended: Status = "interrupted" if found.status == "interrupted" else "optimal" if closed else "gap"
        return replace(found, status=ended, bound_s=min(bound, found.objective_s)), solver.getSolution()

    def bound_memory(self, relaxation: Any, row: MemoryRow, budget_bytes: float) -> None:
        """Add a memory row to the program and to its relaxation, which goes on from where it was."""
        known = len(self._model.row)
        self.add_memory_row(row, budget_bytes)
        columns, values = self._model.column[known:], self._model.value[known:]
        low, high = self._model.low[-1], self._model.high[-1]
        relaxation.addRow(low, high, len(columns), np.array(columns, dtype=np.int32), np.array(values))

    def relaxed(self, limits: Limits) -> Relaxed:
        """Return a bound that no assignment beats, from relaxations alone; infinite if none fits in memory.

        Where the assignment nearest to the relaxation does not fit, its peak becomes a memory row, so that a
        hopeless table shows as one here already. Where time is short, the bound is that of no data moved.
        """
        bound = free = self._unmoved_s()
        solver, until_s = self.relaxation(limits), time.process_time() + limits.seconds
        for number in range(_MEMORY_ROUNDS):
            _run_relaxed(solver, until_s - time.process_time())
            status = solver.getModelStatus()
            if status == highspy.HighsModelStatus.kInfeasible:
                return Relaxed(np.inf, free)
            if status != highspy.HighsModelStatus.kOptimal:
                return Relaxed(bound, free, ended=number > 0)
            bound = max(bound, float(solver.getInfo().objective_function_value))
            free = free if number else bound
            options = self._nearest(np.array(solver.getSolution().col_value))
            curve = memory_curve(self.table, options, self.copies(options), limits.memory_bytes)
            peak = int(np.argmax(curve))
            if curve[peak] <= limits.memory_bytes or peak in self._rows:
                return Relaxed(bound, free)
            self.bound_memory(solver, self.table.memory_row(peak), limits.memory_bytes)
        return Relaxed(bound, free)

    def _unmoved_s(self) -> float:
        """Return what each node's fastest option takes, one after another."""
        return float(sum((node.seconds.sum(axis=1) + node.optimizer_s).min() for node in self.table.nodes))

    def _nearest(self, values: Floats) -> tuple[int, ...]:
        return tuple(
            int(np.argmax(values[first : first + node.options]))
            for node, first in zip(self.table.nodes, self._x, strict=True)
        )

    def _solver(self, limits: Limits) -> Any:
        model = self._model
        solver = QuietHighs()
        for option, value in (("random_seed", limits.seed), ("mip_rel_gap", limits.gap), ("mip_abs_gap", 0.0)):
            solver.setOptionValue(option, value)
        if np.isfinite(limits.cutoff_s):
            solver.setOptionValue("objective_bound", limits.cutoff_s)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(model.cost), len(model.low)
        lp.col_cost_ = np.array(model.cost)
        lp.col_lower_ = np.zeros(len(model.cost))
        lp.col_upper_ = np.array(model.upper)
        lp.row_lower_, lp.row_upper_ = np.array(model.low), np.array(model.high)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[flag] for flag in model.integer]
        order = np.lexsort((model.row, model.column))
        columns = np.array(model.column)[order]
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.searchsorted(columns, np.arange(len(model.cost) + 1)).astype(np.int32)
        lp.a_matrix_.index_ = np.array(model.row, dtype=np.int32)[order]
        lp.a_matrix_.value_ = np.array(model.value)[order]
        solver.passModel(lp)
        return solver

    def _read(self, solver: Any, limits: Limits, ended: _Ended) -> Solution:
        info = solver.getInfo()
        found = info.primal_solution_status == 2
        bound = float(info.mip_dual_bound)
        if not found:
            nothing: Status = "cutoff" if np.isfinite(limits.cutoff_s) else "infeasible"
            if ended != "itself":
                nothing = ended
            proven = limits.cutoff_s if nothing == "cutoff" else bound
            return Solution(nothing, (), np.inf, proven if np.isfinite(proven) else 0.0)
        values = np.array(solver.getSolution().col_value)
        options = self._nearest(values)
        objective = float(info.objective_function_value)
        closed = objective - bound <= 1e-9 * max(1.0, abs(objective))
        reached: Status = "optimal" if closed else "gap"
        if ended == "interrupted" or (ended == "time_limit" and not closed):
            reached = ended
        return Solution(reached, options, objective, min(bound, objective))

    def copies(self, options: Sequence[int]) -> list[set[tuple[int, int]]]:
        """Return, for each group, the pairs of layouts that an assignment redistributes between."""
        return [
            {
                (int(group.layout[options[group.source]]), int(demand.layout[options[demand.node]]))
                for demand in group.demands
            }
            for group in self.table.groups
        ]


def _run(solver: Any, seconds: float) -> _Ended:
    """Run the solver for so many seconds of computing at most; return what ended it, with what it had found by then.

    HiGHS runs in a thread beside, because Python sees a signal only between two calls into C, and because its own
    limit is of the clock: where others compute, too, it would end searches that have hardly begun.
    """
    seconds = max(seconds, _SHORTEST_S)
    until_s = time.process_time() + seconds
    # Told to stop, HiGHS goes on until it has solved the relaxation at the root; of its own clock it thinks sooner.
    solver.setOptionValue("time_limit", solver.getRunTime() + _CLOCK * seconds + _GRACE_S)
    solver.HandleUserInterrupt = True
    solver.startSolve()
    ended: _Ended = "itself"
    while True:
        try:
            if solver.wait(0.1)[0]:
                late = solver.getModelStatus() == highspy.HighsModelStatus.kTimeLimit
                return "time_limit" if late and ended == "itself" else ended
            if ended == "itself" and time.process_time() > until_s:
                ended = "time_limit"
                solver.cancelSolve()
        except KeyboardInterrupt:
            ended = "interrupted"
            solver.cancelSolve()


def _run_relaxed(solver: Any, seconds: float) -> None:
    """Run the solver of a relaxation, of which nothing is of use when it is interrupted."""
    if _run(solver, seconds) == "interrupted":
        raise KeyboardInterrupt


def _options_by_layout(layout: np.ndarray) -> dict[int, list[int]]:
    by_layout: dict[int, list[int]] = {}
    for option, number in enumerate(layout.tolist()):
        by_layout.setdefault(number, []).append(option)
    return by_layout


def memory_curve(
    table: CostTable, options: Sequence[int], copies: Sequence[set[tuple[int, int]]], enough_bytes: float = 0.0
) -> Floats:
    """Return the bytes held at each position under an assignment; at most so many where no more than `enough_bytes`."""
    held = table.memory_curve(tuple(options), copies)
    if table.freed is None or held.max() <= enough_bytes:
        return held
    return np.asarray(held - table.freed(tuple(options)), dtype=np.float64)
