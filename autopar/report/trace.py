"""Timelines as the JSON that Perfetto and chrome://tracing show: of a plan, and of what was measured of it.

Format: "Trace Event Format", Google; times are in microseconds. A rank is a process, a stream a thread. Predicted and
measured timelines name streams and collectives alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.errors import UsageError
from autopar.ir.plan import Plan, Span
from autopar.ir.tasks import COMPUTE

_US = 1e6
"""Microseconds of a second."""


def plan_trace(plan: Plan) -> str:
    """Return the predicted step of a plan as a trace.

    Raises:
        UsageError: the plan has no timeline.
    """
    if not plan.estimates.timeline:
        raise UsageError(
            "the plan holds no timeline: it was written by an older autopar, or has micro-batches without pipeline "
            "stages, whose step is not simulated; plan again, without --fix microbatch"
        )
    return trace(plan.estimates.timeline)


def trace(spans: Sequence[Span]) -> str:
    """Return spans as a trace, an event a line."""
    lines = ",\n".join(json.dumps(event) for event in _events(spans))
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _events(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    for rank in sorted({each.rank for each in spans}):
        own = [each for each in spans if each.rank == rank]
        streams = dict.fromkeys((COMPUTE, *(each.stream for each in own)))
        threads = {name: number for number, name in enumerate(streams)}
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for name, thread in threads.items():
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
        for each in own:
            event = {
                "name": each.name,
                "cat": COMPUTE if each.stream == COMPUTE else "collective",
                "ph": "X",
                "pid": rank,
                "tid": threads[each.stream],
                "ts": each.start_s * _US,
                "dur": (each.end_s - each.start_s) * _US,
            }
            if each.stream != COMPUTE:
                event["args"] = {"exposed_us": each.exposed_s * _US}
            yield event
