"""One trial of the search, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from autopar.api.pipelining import Pipelined
from autopar.costs.outcome import Outcome
from autopar.search.ilp import Solution
from autopar.search.trials import Trial

WHY_NOT = {
    "infeasible": "does not fit in memory",
    "cutoff": "does not fit in memory, or is proven slower than the plan",
    "time_limit": "no plan found within the time limit",
    "interrupted": "not solved: the search was interrupted",
}

NOTHING = Solution("infeasible", (), inf, inf)
"""Of trials that have no plan."""


@dataclass
class Solved:
    """One trial and how its search ended."""

    trial: Trial
    solution: Solution
    outcome: Outcome | None = None
    step_s: float = inf
    why_not: str = ""
    pipeline: Pipelined | None = None
    free_s: float = 0.0
    """No plan of it would be faster, were memory no limit: of one that does not fit, whose lighter kin may."""


def ruled_out(trial: Trial, bound_s: float) -> Solved:
    """Return a trial that its blocks as a fluid rule out."""
    if bound_s == inf:
        why = "does not fit in memory, however it is cut and recomputed"
        return Solved(trial, NOTHING, why_not=why)
    return left_out(trial, bound_s, f"at least {bound_s:.4g} s, however it is cut and recomputed")


def left_out(trial: Trial, bound_s: float, why: str) -> Solved:
    """Return a trial that was not solved, of which a bound is known."""
    return Solved(trial, Solution("cutoff", (), inf, bound_s), why_not=why)


def interrupted(trial: Trial, bound_s: float) -> Solved:
    """Return a trial that the user did not wait for."""
    return Solved(trial, Solution("interrupted", (), inf, bound_s), why_not=WHY_NOT["interrupted"])
