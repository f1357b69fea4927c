"""What a rank holds while it works through its actions; their order decides, not their times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.ir.pipeline import PipelineCosts
from autopar.ir.schedule import Action, Kind
from autopar.ir.timeline import Event, MemoryPoint

COMPUTATIONS: tuple[Kind, ...] = ("F", "B", "I", "W")


def static_bytes(costs: PipelineCosts, rank_of: Sequence[int], rank: int) -> int:
    """Return the bytes that a rank's stages hold from start to end."""
    return sum(cost.static_bytes for cost, owner in zip(costs.stages, rank_of, strict=True) if owner == rank)


def levels(costs: PipelineCosts, held: int, actions: Iterable[Action]) -> Iterator[tuple[int, int]]:
    """Yield the bytes held while each computation runs and after it; `held` is what there is before the first."""
    stages = list(enumerate(costs.stages))
    taken = {(stage, kind): cost.allocated_bytes(kind) for stage, cost in stages for kind in COMPUTATIONS}
    given = {(stage, kind): cost.released_bytes(kind) for stage, cost in stages for kind in COMPUTATIONS}
    for stage, kind, _ in actions:
        during = held + taken[stage, kind]
        held = during - given[stage, kind]
        yield during, held


def memory_curve(costs: PipelineCosts, held: int, events: Sequence[Event]) -> tuple[MemoryPoint, ...]:
    """Return the bytes that a rank holds from 0 s on, a point a change."""
    points = [MemoryPoint(0.0, held)]
    actions = (event.action for event in events)
    for event, (during, after) in zip(events, levels(costs, held, actions), strict=True):
        if during != held:
            points.append(MemoryPoint(event.start_s, during))
        if after != during:
            points.append(MemoryPoint(event.end_s, after))
        held = after
    return tuple(points)
