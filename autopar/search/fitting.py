"""The best assignment that fits in memory at every moment: rows at peaks are added until none is violated."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from autopar.ir.table import CostTable
from autopar.search.ilp import Ilp, Limits, Solution, memory_curve

_NEAR_ROUNDS = 8
"""Assignments near the relaxation at most, each with one more memory row."""


def smallest_peak(table: CostTable, limits: Limits) -> Solution:
    """Return the assignment that needs the least memory at its peak; `objective_s` is then meaningless.

    For telling a user how far an infeasible problem is from fitting.
    """
    program = Ilp(table)
    peak = program.minimise_peak()
    seen: set[int] = set()
    while True:
        found = program.solve(limits)
        if not found.options:
            return found
        curve = memory_curve(table, found.options, program.copies(found.options))
        at = int(np.argmax(curve))
        if at in seen:
            return Solution(found.status, found.options, found.objective_s, found.bound_s, float(curve[at]))
        seen.add(at)
        program.add_memory_row(table.memory_row(at), limits.memory_bytes, peak)


def solve(table: CostTable, limits: Limits) -> Solution:
    """Return the fastest assignment that fits in memory at every moment, its bound, and how the solve ended."""
    return solve_program(Ilp(table), limits)


def solve_program(program: Ilp, limits: Limits) -> Solution:
    """Return what `solve` returns, for a program already built.

    Assignments near the relaxation come first: they show at which moments memory matters, and one within the gap of
    the relaxation ends the search. Else the whole program is solved, from the last of them that fits. Where what it
    finds does not fit, assignments near the relaxation come again, and one within the gap of what the whole program
    proved ends the search.
    """
    started = time.process_time()
    table, start = program.table, None

    def left() -> Limits:
        return replace(limits, seconds=limits.seconds - (time.process_time() - started))

    def peak_of(found: Solution) -> tuple[int, float]:
        curve = memory_curve(table, found.options, program.copies(found.options), limits.memory_bytes)
        peak = int(np.argmax(curve))
        return peak, float(curve[peak])

    relaxation = program.relaxation(limits)
    ties, proven_s = False, 0.0
    fits: Solution | None = None
    while True:
        for _ in range(_NEAR_ROUNDS):
            near = program.near(relaxation, left(), ties=ties, start=start)
            if near is None:
                break
            found, values = near
            if not found.options:
                return replace(found, bound_s=max(found.bound_s, proven_s))
            found = replace(found, bound_s=min(max(found.bound_s, proven_s), found.objective_s))
            peak, held = peak_of(found)
            if held <= limits.memory_bytes:
                open_s = found.objective_s - found.bound_s
                if found.status != "gap" or open_s <= limits.gap * found.objective_s:
                    return replace(found, peak_bytes=held)
                start, fits = values, replace(found, peak_bytes=held)
                break
            if found.status == "interrupted":
                return Solution("interrupted", (), np.inf, found.bound_s)
            if program.has_memory_row(peak):
                break
            program.bound_memory(relaxation, table.memory_row(peak), limits.memory_bytes)
        if fits is not None and left().seconds <= 0:
            return replace(fits, status="time_limit")
        found, start = program.solve(left(), start), None
        if not found.options:
            return found if fits is None or found.status != "time_limit" else replace(fits, status="time_limit")
        peak, held = peak_of(found)
        if held <= limits.memory_bytes:
            return replace(found, peak_bytes=held)
        if found.status == "interrupted":
            return Solution("interrupted", (), np.inf, found.bound_s)
        if program.has_memory_row(peak):
            raise RuntimeError(f"memory row at position {peak} was added and is still violated")
        # What the whole program proved holds with one row more.
        program.bound_memory(relaxation, table.memory_row(peak), limits.memory_bytes)
        ties, proven_s = True, max(proven_s, found.bound_s)
