"""Which blocks to recompute, and how: the cheapest ways that fit, where one way for all is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from autopar.search.highs import QuietHighs

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Room:
    """What is held at one point of a step while every block is recomputed whole."""

    held_bytes: float
    copies: Floats
    """Of each block, how often what it keeps beyond that is held there: once for each micro-batch in flight."""


@dataclass(frozen=True)
class Ways:
    """Blocks and the ways of recomputing them; rows are blocks, columns ways."""

    seconds: Floats
    """What a micro-batch's recomputation takes."""

    kept_bytes: Floats
    """What is kept of a micro-batch beyond what whole recomputation keeps."""


def cheapest(ways: Ways, rooms: Sequence[Room], budget_bytes: float, *, time_limit_s: float = 5.0) -> list[int] | None:
    """Return the way of each block such that all fits and recomputation takes least; `None` if nothing fits.

    Of equally cheap ones, any.
    """
    if any(room.held_bytes > budget_bytes for room in rooms):
        return None
    blocks, count = ways.seconds.shape
    tight = _binding(ways, [room for room in rooms if _most(ways, room) > budget_bytes])
    if not tight:
        return [int(each) for each in np.argmin(ways.seconds, axis=1)]
    solver = QuietHighs()
    # HiGHS 1.16 may strengthen dense rows of equal numbers without end before it solves anything: no limit ends that.
    options = {"random_seed": 0, "time_limit": time_limit_s, "mip_rel_gap": 1e-3, "presolve": "off"}
    for option, value in options.items():
        solver.setOptionValue(option, value)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = blocks * count, blocks + len(tight)
    # Of the order of 1, or differences of microseconds are below the solver's absolute tolerances.
    lp.col_cost_ = (ways.seconds / (float(ways.seconds.max()) or 1.0)).ravel()
    lp.col_lower_, lp.col_upper_ = np.zeros(blocks * count), np.ones(blocks * count)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * (blocks * count)
    free = np.array([budget_bytes - room.held_bytes for room in tight])
    scale = max(1.0, float(np.abs(ways.kept_bytes).max()))
    lp.row_lower_ = np.concatenate([np.ones(blocks), np.full(len(tight), -highspy.kHighsInf)])
    lp.row_upper_ = np.concatenate([np.ones(blocks), free / scale])
    one_each = np.kron(np.eye(blocks), np.ones(count))
    held = [(room.copies[:, None] * ways.kept_bytes / scale).ravel() for room in tight]
    matrix = np.vstack([one_each, *held])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    filled = [np.flatnonzero(row) for row in matrix]
    lp.a_matrix_.start_ = np.cumsum([0, *(len(each) for each in filled)]).astype(np.int32)
    lp.a_matrix_.index_ = np.concatenate(filled).astype(np.int32)
    lp.a_matrix_.value_ = np.concatenate([row[each] for row, each in zip(matrix, filled, strict=True)])
    solver.passModel(lp)
    solver.run()
    if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    values = np.array(solver.getSolution().col_value).reshape(blocks, count)
    return [int(each) for each in np.argmax(values, axis=1)]


def held(ways: Ways, room: Room, chosen: Sequence[int]) -> float:
    """Return the bytes held at a point with these ways."""
    return room.held_bytes + float(room.copies @ ways.kept_bytes[np.arange(len(chosen)), list(chosen)])


def _binding(ways: Ways, rooms: Sequence[Room]) -> list[Room]:
    """Return the rooms that no other one implies, which holds as much and no less of any block."""
    if (ways.kept_bytes < 0).any():  # what is held more often may then be less
        return list(rooms)
    found: list[Room] = []
    for room in sorted(rooms, key=lambda each: (-each.held_bytes, -float(each.copies.sum()))):
        if not any((other.copies >= room.copies).all() for other in found):
            found.append(room)
    return found


def _most(ways: Ways, room: Room) -> float:
    """Return the most that can be held at a point."""
    return room.held_bytes + float(room.copies @ ways.kept_bytes.max(axis=1))


def share_of_seconds(ways: Ways, share_freed: float) -> float:
    """Return which share of recomputing all blocks frees a share of the memory that it frees, parts of blocks allowed.

    What frees most for its time comes first: norms and activations hold much and take little, long attention is the
    other way round. Both shares are from 0 to 1; the last way is that of recomputing all.
    """
    steps = sorted(undone(ways), key=lambda step: step[0] / step[1])
    left, taken = min(max(share_freed, 0.0), 1.0) * sum(less for _, less in steps), 0.0
    for seconds_more, less in steps:
        part = min(1.0, left / less)
        taken, left = taken + part * seconds_more, left - part * less
        if left <= 0:
            break
    total = float((ways.seconds[:, -1] - ways.seconds.min(axis=1)).sum())
    return min(1.0, taken / total) if total > 0 else 0.0


def undone(ways: Ways) -> list[tuple[float, float]]:
    """Return the steps from recomputing all of each block to recomputing nothing: seconds less, and bytes more."""
    freed = ways.kept_bytes.max(axis=1, keepdims=True) - ways.kept_bytes
    each = zip(ways.seconds, freed, strict=True)
    return [step for seconds, less in each for step in _steps(seconds - seconds.min(), less)]


def _steps(seconds: Floats, freed: Floats) -> list[tuple[float, float]]:
    """Return a block's ways as steps of seconds more and bytes less, each dearer than the one before it."""
    found: list[tuple[float, float]] = []
    at = 0.0, 0.0
    while True:
        more = [(each - at[0], less - at[1]) for each, less in zip(seconds, freed, strict=True) if less > at[1]]
        if not more:
            return found
        step = min(more, key=lambda one: (one[0] / one[1], -one[1]))
        found.append(step)
        at = at[0] + step[0], at[1] + step[1]
