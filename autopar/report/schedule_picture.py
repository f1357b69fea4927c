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


def schedule_picture(timeline: Timeline, width: int = _WIDTH) -> str:
    """Return the picture, with the scale, the legend and the bubble below; time takes at most `width` columns."""
    makespan_s = timeline.makespan_s
    if not makespan_s:
        return "nothing takes any time\n"
    several = any(len({event.action.stage for event in rank.events}) > 1 for rank in timeline.ranks)
    columns = _columns(timeline, width, several)
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


def _columns(timeline: Timeline, width: int, several: bool) -> int:
    """Return the columns in which the shortest action shows the longest label and a dash; `width` if too many."""
    events = [event for rank in timeline.ranks for event in rank.events]
    shortest_s = min(event.end_s - event.start_s for event in events if event.end_s > event.start_s)
    longest = max(len(_label(event, several)) for event in events)
    return min(width, max(1, round((longest + 1) * timeline.makespan_s / shortest_s)))


def _row(rank: RankTimeline, columns_per_s: float, columns: int, several: bool) -> str:
    cells = [_IDLE] * columns
    for event in rank.events:
        start, end = round(event.start_s * columns_per_s), round(event.end_s * columns_per_s)
        cells[start:end] = _cell(event, end - start, several)
    return "".join(cells)


def _cell(event: Event, width: int, several: bool) -> str:
    """Return an action in exactly `width` columns; one narrower than a column is not seen."""
    label = _label(event, several)
    return label.ljust(width, "-") if len(label) <= width else event.action.kind.ljust(width, "-")[:width]


def _label(event: Event, several: bool) -> str:
    action = event.action
    return str(action) if several else f"{action.kind}{action.microbatch}"
