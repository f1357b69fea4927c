"""How much memory collectives that travel together may hold, of what a plan leaves."""

from __future__ import annotations

from dataclasses import replace

from autopar.costs.outcome import Outcome

_HALVED = 4
"""Rooms at most that are tried, each half of the one before."""


def with_room(outcome: Outcome, budget: int) -> Outcome:
    """Return an outcome whose collectives may hold, to travel together, what memory is left of a budget in bytes."""
    behind = (each.message.op for each in outcome.messages() if each.mergeable)
    if not outcome.merges or outcome.microbatches > 1 or all(op == "all_reduce" for op in behind):
        return outcome
    spare_bytes = max(0, budget - replace(outcome, merges=False).memory().total)
    # What two runs hold is not all of it: each delays what would have been over by then.
    halves = dict.fromkeys(spare_bytes >> times for times in range(_HALVED))
    rooms = (replace(outcome, spare_bytes=each) for each in halves)
    return next((roomy for roomy in rooms if roomy.memory().total <= budget), outcome)
