"""Which reductions of gradients travel together.

A reduction of its own can start as soon as its gradient is there, but each call costs latency; a merged one waits for
its last member. Reductions of one mesh axis run one after another, in the order in which their gradients become
ready, so the best merging is a cut of that sequence into runs. It is found exactly: of all cuts, the one after which
the step ends first, and of those equally good, the one with the fewest calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LATENCY_SHARE = 0.01
"""A message is large enough when less than this share of its seconds would be saved by making it twice as large."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """One gradient that is summed over the ranks of one axis."""

    name: str
    """Of the parameter."""

    axis: int
    bytes: int
    dtype: str
    ready_s: float
    """Moment of the backward pass at which the gradient's local term is there."""


Seconds = Callable[[int], float]
"""Seconds of one reduction of so many bytes."""


def bucketed(
    reductions: Sequence[Reduction],
    seconds: Seconds,
    end_s: float,
    call_s: float,
    enough: float = LATENCY_SHARE,
) -> list[list[Reduction]]:
    """Return the reductions of one axis and dtype, in the order of readiness, cut into runs that travel together.

    `end_s` is when the computation of the backward pass ends, `call_s` what each call takes from it. Runs are not
    made longer where that saves less than the share `enough` of their seconds; with 0 every cut is looked at.
    """
    ready = sorted(reductions, key=lambda each: each.ready_s)
    if not ready:
        return []
    # reached[j][calls]: when the first j are reduced at the earliest, with so many calls, and where the last run began.
    reached: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stop in range(1, len(ready) + 1):
        best: dict[int, tuple[float, int]] = {}
        size = 0
        for start in range(stop - 1, -1, -1):
            size += ready[start].bytes
            taken = seconds(size)
            for calls, (free, _) in reached[start].items():
                done = max(free, ready[stop - 1].ready_s) + taken
                if calls + 1 not in best or done < best[calls + 1][0]:
                    best[calls + 1] = (done, start)
            if start < stop - 1 and 2 * taken - seconds(2 * size) < enough * taken:
                break
        reached.append(_worth_their_calls(best))
    calls = min(reached[-1], key=lambda n: (max(reached[-1][n][0], end_s) + n * call_s, n))
    runs: list[list[Reduction]] = []
    stop = len(ready)
    while stop:
        start = reached[stop][calls][1]
        runs.append(ready[start:stop])
        stop, calls = start, calls - 1
    return runs[::-1]


def _worth_their_calls(found: dict[int, tuple[float, int]]) -> dict[int, tuple[float, int]]:
    """Return those numbers of calls that are done earlier than with any smaller number."""
    kept: dict[int, tuple[float, int]] = {}
    for calls in sorted(found):
        if not kept or found[calls][0] < min(done for done, _ in kept.values()):
            kept[calls] = found[calls]
    return kept
