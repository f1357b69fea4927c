"""A small linear program of sharing blocks: the least value of its last column."""

from __future__ import annotations

import highspy
import numpy as np
from numpy.typing import NDArray

from autopar.search.highs import QuietHighs


def minimised(
    rows: NDArray[np.float64], lower: NDArray[np.float64], upper: NDArray[np.float64], most: NDArray[np.float64]
) -> float:
    """Return the least the last column can be; infinite where nothing satisfies the rows, 0 where none was found.

    Each row, times the columns, is within `lower` and `upper`, each column within 0 and `most`.
    """
    return Program(rows, lower, upper, most).solved()[0]


class Program:
    """Such a program, which may get further rows: it is then solved from where it was."""

    def __init__(
        self,
        rows: NDArray[np.float64],
        lower: NDArray[np.float64],
        upper: NDArray[np.float64],
        most: NDArray[np.float64],
    ) -> None:
        lp = highspy.HighsLp()
        lp.num_row_, lp.num_col_ = rows.shape
        lp.col_cost_ = np.append(np.zeros(rows.shape[1] - 1), 1.0)
        lp.col_lower_, lp.col_upper_ = np.zeros(rows.shape[1]), most
        lp.row_lower_, lp.row_upper_ = lower, upper
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        at, place = rows.nonzero()
        lp.a_matrix_.start_ = np.searchsorted(at, np.arange(len(rows) + 1)).astype(np.int32)
        lp.a_matrix_.index_, lp.a_matrix_.value_ = place.astype(np.int32), rows[at, place]
        self._solver = QuietHighs()
        self._solver.passModel(lp)

    def at_most(self, row: NDArray[np.float64], upper: float) -> None:
        """Demand that a row, times the columns, is no more than that."""
        (place,) = row.nonzero()
        self._solver.addRow(-highspy.kHighsInf, upper, len(place), place.astype(np.int32), row[place])

    def solved(self) -> tuple[float, NDArray[np.float64]]:
        """Return what `minimised` does, and all columns, which are empty where none was found."""
        solver = self._solver
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return float("inf"), np.empty(0)
        if status != highspy.HighsModelStatus.kOptimal:
            return 0.0, np.empty(0)
        return float(solver.getInfo().objective_function_value), np.array(solver.getSolution().col_value)
