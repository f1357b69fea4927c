"""Whose turn it is among trials that wait to be relaxed, and those that wait to be solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from autopar.api.kinds import is_harder
from autopar.api.solving import Waiting
from autopar.search.trials import Trial

LATE = 0.4
"""Share of the time limit: with less than that left for trials it is late to be without a plan."""

AT_MOST = 0.2
"""Share of the time left that one trial may take to be relaxed where others wait, or solved where there is a plan, too.

What comes late in a long solution is the proof that little is left to gain; the others are further away. And what
takes long to relax (an LSTM of some thousand operators, none of them equal, on free axes) is not solved in time.
"""

_AXIS, _FURTHER, _FEW = 0.02, (0.06, 0.15), 2
"""Share of its seconds by which a trial comes later for each of its axes, and for each beyond a few, the more so where
time is short: with more of them it takes several times as long to relax and solve, and estimates err by more."""

Turn = tuple[float, int, Trial | Waiting]
"""Estimated or bounded seconds of a trial, its place among the others, and what is known of it."""


def turn_s(trial: Trial, likely_s: float, off: Mapping[Trial, float], *, short: bool = False) -> float:
    """Return the seconds by which a trial's turn comes, of which an estimate is known.

    `off`: how many times as long as estimated the plans took that were found. That they were faster brings no turn
    forward. `short`: time is short for a program as large as this.
    """
    axes = len(trial.ranks)
    later = 1.0 + _AXIS * axes + _FURTHER[short] * max(0, axes - _FEW)
    return likely_s * max(1.0, off_by(trial, off) or 1.0) * later


def off_by(trial: Trial, off: Mapping[Trial, float]) -> float | None:
    """Return how many times as long as foreseen a trial takes at least, if what is known of others tells.

    What is of a trial's kind is foreseen wrong in the same way, and easier ones are so by no more.
    """
    return min((times for each, times in off.items() if is_harder(trial, each)), default=None)


def alternating(trials: Sequence[Trial]) -> list[Trial]:
    """Return trials with pipelines and the whole program by turns, as long as there are both, each in the order given.

    Estimates of the two are off for reasons of their own: memory that recomputation frees here, bubbles there. Where
    those of one are all too fast, they would take all the time before one of the other is looked at.
    """
    apart = [[each for each in trials if (each.depth > 1) == staged] for staged in (False, True)]
    return [each for pair in zip_longest(*apart) for each in pair if each is not None]


def next_turn(
    turns: Sequence[Turn], *, late: bool, planned: bool = True, failed: Mapping[bool, int] | None = None
) -> Turn:
    """Return the least by estimate or bound; when it is `late`, of those that are relaxed already, if any are.

    Of deep programs on many axes a few relaxations take all the time, and bounds without a plan are of use to nobody.
    Nor are they before anything is `planned`: free axes take many times as long to solve as those with a role, and
    nothing is left of the time for others. What waits to be solved without free axes goes ahead of what has some.
    `failed`: how many trials, with stages and without, did not fit so far; till something is planned those of which
    fewer did come first. What estimates of one of the two think too little of, the next of it is likely short of.
    """
    waiting = [turn for turn in turns if isinstance(turn[2], Waiting)] if late else []
    waiting = waiting or list(turns)
    if failed and not planned:
        fewest = min(failed.get(is_staged(turn), 0) for turn in waiting)
        waiting = [turn for turn in waiting if failed.get(is_staged(turn), 0) == fewest]
    found = min(waiting, key=lambda turn: turn[:2])
    if planned or not _is_free(found):
        return found
    return min((turn for turn in turns if _is_quick(turn)), key=lambda turn: turn[:2], default=found)


def is_staged(turn: Turn) -> bool:
    """Return whether a trial has stages."""
    return (turn[2].trial if isinstance(turn[2], Waiting) else turn[2]).depth > 1


def _is_free(turn: Turn) -> bool:
    return isinstance(turn[2], Waiting) and any(axis.role == "free" for axis in turn[2].trial.mesh)


def _is_quick(turn: Turn) -> bool:
    """Return whether it is relaxed and has no free axes; what took too long to relax is not quick to solve."""
    return isinstance(turn[2], Waiting) and turn[2].ended and not _is_free(turn)
