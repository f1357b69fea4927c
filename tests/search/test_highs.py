"""The solver says nothing on stdout, where `autopar plan --json` and the like print what users asked for."""

from __future__ import annotations

import subprocess
import sys

SOLVE = """
import highspy
from autopar.search.highs import QuietHighs
solver = QuietHighs()
lp = highspy.HighsLp()
lp.num_col_, lp.num_row_ = 1, 0
lp.col_cost_, lp.col_lower_, lp.col_upper_ = [1.0], [2.0], [3.0]
solver.passModel(lp)
solver.run()
assert solver.getInfo().objective_function_value == 2.0
assert solver.getOptionValue("threads")[1] == 1
"""


def test_nothing_is_printed():
    """Not even by the first solver of a process, of which version 1.16 tells before it has any option."""
    found = subprocess.run([sys.executable, "-c", SOLVE], capture_output=True, text=True, timeout=120, check=False)

    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
