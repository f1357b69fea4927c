"""A pipeline's timeline as the JSON that Perfetto and chrome://tracing show.

Format: "Trace Event Format", Google; times are in microseconds. A rank is a process, a stream a thread, and what the
rank holds a counter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autopar.ir.timeline import COMPUTE_STREAM, Event, RankTimeline, Timeline

_US = 1e6
"""Microseconds of a second."""


def pipeline_trace(timeline: Timeline) -> str:
    """Return the trace, an event a line."""
    events = (event for number, rank in enumerate(timeline.ranks) for event in _rank_events(number, rank))
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _rank_events(number: int, rank: RankTimeline) -> Iterator[dict[str, Any]]:
    streams = {COMPUTE_STREAM: 0}
    for each in rank.sends:
        streams.setdefault(each.stream, len(streams))
    yield {"name": "process_name", "ph": "M", "pid": number, "args": {"name": f"rank {number}"}}
    for name, thread in streams.items():
        yield {"name": "thread_name", "ph": "M", "pid": number, "tid": thread, "args": {"name": name}}
    for event in (*rank.events, *rank.sends):
        yield _complete(event, streams[event.stream])
    for point in rank.memory:
        yield {
            "name": "memory",
            "ph": "C",
            "pid": number,
            "ts": point.at_s * _US,
            "args": {"bytes": point.held_bytes},
        }


def _complete(event: Event, thread: int) -> dict[str, Any]:
    return {
        "name": str(event.action),
        "cat": event.stream.split()[0],
        "ph": "X",
        "pid": event.rank,
        "tid": thread,
        "ts": event.start_s * _US,
        "dur": (event.end_s - event.start_s) * _US,
        "args": {"what": event.action.words, "stage": event.action.stage, "microbatch": event.action.microbatch},
    }
