"""Whose turn it is among trials that wait to be relaxed, and those that wait to be solved."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.api.solving import Waiting
from autopar.search.trials import Trial

LATE = 0.4
"""Share of the time limit: with less than that left for trials it is late to be without a plan."""

_AXIS = 0.02
"""Share of its seconds by which a trial comes later for each of its axes: with more of them it takes several times as
long to relax and solve, and estimates err by more."""

Turn = tuple[float, int, Trial | Waiting]
"""Estimated or bounded seconds of a trial, its place among the others, and what is known of it."""


def turn_s(trial: Trial, likely_s: float) -> float:
    """Return the seconds by which a trial's turn comes, of which an estimate is known."""
    return likely_s * (1.0 + _AXIS * len(trial.ranks))


def next_turn(turns: Sequence[Turn], *, late: bool) -> Turn:
    """Return the least by estimate or bound; when it is `late`, of those that are relaxed already, if any are.

    Of deep programs on many axes a few relaxations take all the time, and bounds without a plan are of use to nobody.
    """
    ready = [turn for turn in turns if isinstance(turn[2], Waiting)] if late else []
    return min(ready or turns, key=lambda turn: turn[:2])
