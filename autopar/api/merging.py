"""How much memory collectives that travel together may hold, of what a plan leaves."""

from __future__ import annotations

from autopar.costs.outcome import Outcome

_SHARES = (1.0, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
"""Shares of what is left that are tried, the largest first."""


def with_room(outcome: Outcome, budget: int) -> Outcome:
    """Return an outcome whose collectives may hold, to travel together, what memory is left of a budget in bytes."""
    behind = (each.message.op for each in outcome.messages() if each.mergeable)
    if not outcome.merges or outcome.microbatches > 1 or all(op == "all_reduce" for op in behind):
        return outcome
    spare_bytes = max(0, budget - outcome.merging(merges=False).memory().total)
    # What two runs hold is not all of it: each delays what would have been over by then.
    shares = dict.fromkeys(int(share * spare_bytes) for share in _SHARES)
    rooms = (outcome.merging(spare_bytes=each) for each in shares)
    return next((roomy for roomy in rooms if roomy.memory().total <= budget), outcome)
