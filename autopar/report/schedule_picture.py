"""A pipeline's timeline as text: one row a rank, time from left to right.

    rank 0  F0-F1-F2-F3-......B0----B1----B2----B3----  bubble 27%

An action is its letter and micro-batch, with its stage before them where ranks have several, filled up with dashes;
where it is too narrow for that, its letter alone. Dots are idle.
"""

from __future__ import annotations

from autopar.figures import format_seconds
from autopar.ir.schedule import MEANING
from autopar.ir.timeline import Event, RankTimeline, Timeline

_IDLE = "."
_WIDTH = 120
"""Columns of time where nothing else is asked for."""

_NARROWEST = 3
"""Columns that the shortest action gets where the width allows: a letter, a digit and a dash."""


def schedule_picture(timeline: Timeline, width: int = _WIDTH) -> str:
    """Return the picture, with the scale, the legend and the bubble below; time takes at most `width` columns."""
    makespan_s = timeline.makespan_s
    if not makespan_s:
        return "nothing takes any time\n"
    columns = _columns(timeline, width)
    several = any(len({event.action.stage for event in rank.events}) > 1 for rank in timeline.ranks)
    margin = len(f"rank {len(timeline.ranks) - 1}")
    lines = []
    for number, rank in enumerate(timeline.ranks):
        row = _row(rank, columns / makespan_s, columns, several)
        lines.append(f"{f'rank {number}':<{margin}}  {row}  bubble {rank.bubble_s / makespan_s:.0%}")
    kinds = {event.action.kind for rank in timeline.ranks for event in rank.events}
    legend = ", ".join(f"{kind} {words}" for kind, words in MEANING.items() if kind in kinds)
    lines.append(
        f"1 column = {format_seconds(makespan_s / columns)}, {legend}, {_IDLE} idle; "
        f"step {format_seconds(makespan_s)}, bubble {timeline.bubble_fraction:.1%}"
    )
    return "\n".join([*lines, ""])


def _columns(timeline: Timeline, width: int) -> int:
    """Return the columns that show the shortest action as `_NARROWEST`, or `width` where these are too many."""
    lengths = [event.end_s - event.start_s for rank in timeline.ranks for event in rank.events]
    shortest_s = min(length for length in lengths if length > 0)
    return min(width, max(1, round(_NARROWEST * timeline.makespan_s / shortest_s)))


def _row(rank: RankTimeline, columns_per_s: float, columns: int, several: bool) -> str:
    cells = [_IDLE] * columns
    for event in rank.events:
        start, end = round(event.start_s * columns_per_s), round(event.end_s * columns_per_s)
        cells[start:end] = _cell(event, end - start, several)
    return "".join(cells)


def _cell(event: Event, width: int, several: bool) -> str:
    """Return an action in exactly `width` columns; one narrower than a column is not seen."""
    action = event.action
    label = str(action) if several else f"{action.kind}{action.microbatch}"
    return label.ljust(width, "-") if len(label) <= width else action.kind.ljust(width, "-")[:width]
