"""A schedule and the costs of its stages become a timeline: when each rank computes, sends, waits, and what it holds.

Every rank has one compute stream, which runs its actions in order, and one stream for what it sends to each other rank,
which moves one message at a time. A computation starts when the rank is free and its inputs have arrived. Times follow
in one pass over the actions, producers first, so the work is proportional to their number.

Not modelled: links that several streams share, computation slowed by transfers beside it, launch overheads, received
values that wait in buffers, and temporary memory inside a computation.
"""

from __future__ import annotations

from collections import defaultdict

from autopar.ir.pipeline import PipelineCosts
from autopar.ir.schedule import Action, Kind, PipelineSchedule
from autopar.ir.timeline import COMPUTE_STREAM, Event, RankTimeline, Timeline
from autopar.simulate.errors import other_stages, stuck
from autopar.simulate.memory import COMPUTATIONS, memory_curve, static_bytes
from autopar.simulate.replay import in_order, neighbours, replay


def simulate(schedule: PipelineSchedule, costs: PipelineCosts, *, blocking: bool = False) -> Timeline:
    """Return the timeline of one step.

    Values are sent as soon as they are made, whatever sends and receives the schedule writes out. With `blocking` the
    sender computes nothing until its message has arrived; else transfers run beside computation. Stages of one rank
    hand over for nothing. Raises `ScheduleError` where ranks wait for one another forever, see `check`.
    """
    if len(costs.stages) != schedule.stages:
        raise other_stages(schedule, len(costs.stages))
    schedule = schedule.compute_only()
    replayed = replay(schedule, costs.skips)
    if replayed.waits:
        raise stuck(schedule, replayed.waits)
    run = _Run(schedule, costs, blocking)
    for rank, action in in_order(schedule, replayed):
        run.compute(rank, action)
    return run.timeline()


class _Run:
    """The clocks of all ranks while the actions go by."""

    def __init__(self, schedule: PipelineSchedule, costs: PipelineCosts, blocking: bool) -> None:
        self._blocking = blocking
        self._costs = costs
        self._schedule = schedule
        self._seconds = {(s, k): cost.seconds(k) for s, cost in enumerate(costs.stages) for k in COMPUTATIONS}
        self._reads, self._feeds = _routes(schedule, costs)
        self._free_s = [0.0] * schedule.ranks
        self._wire_free_s: dict[tuple[int, int], float] = defaultdict(float)
        # By (target stage, source stage, "F" or "I", micro-batch): when the value was made, when it arrived.
        self._arrived_s: dict[tuple[int, int, str, int], tuple[float, float]] = {}
        self._events: list[list[Event]] = [[] for _ in range(schedule.ranks)]
        self._sends: list[list[Event]] = [[] for _ in range(schedule.ranks)]
        self._exposed_s = [0.0] * schedule.ranks

    def compute(self, rank: int, action: Action) -> None:
        """Put a computation on its rank, after everything it reads, and send what it makes."""
        stage, kind, microbatch = action
        free_s = self._free_s[rank]
        start_s = free_s
        last_made_s = free_s
        way = "I" if kind == "B" else kind
        for source in self._reads[way][stage]:
            made_s, arrived_s = self._arrived_s.pop((stage, source, way, microbatch))
            if arrived_s > start_s:
                start_s, last_made_s = arrived_s, made_s
        self._exposed_s[rank] += start_s - max(free_s, last_made_s) if start_s > free_s else 0.0
        end_s = start_s + self._seconds[stage, kind]
        self._events[rank].append(Event(rank, COMPUTE_STREAM, action, start_s, end_s))
        self._free_s[rank] = end_s
        for target, to, seconds in self._feeds[way][stage]:
            self._arrived_s[target, stage, way, microbatch] = (end_s, self._send(rank, to, action, seconds, end_s))

    def _send(self, rank: int, to: int, action: Action, seconds: float, made_s: float) -> float:
        """Return when the value of a computation that ended at `made_s` is on another rank."""
        if to == rank:
            return made_s
        start_s = max(self._free_s[rank] if self._blocking else made_s, self._wire_free_s[rank, to])
        end_s = start_s + seconds
        self._wire_free_s[rank, to] = end_s
        if self._blocking:
            self._exposed_s[rank] += end_s - self._free_s[rank]
            self._free_s[rank] = end_s
        kind: Kind = "SEND_F" if action.kind == "F" else "SEND_B"
        self._sends[rank].append(Event(rank, f"to {to}", Action(action.stage, kind, action.microbatch), start_s, end_s))
        return end_s

    def timeline(self) -> Timeline:
        """Return what happened."""
        makespan_s = max((row[-1].end_s for row in self._events if row), default=0.0)
        return Timeline(tuple(self._rank(rank, makespan_s) for rank in range(self._schedule.ranks)))

    def _rank(self, rank: int, makespan_s: float) -> RankTimeline:
        events = tuple(self._events[rank])
        compute_s = sum(event.end_s - event.start_s for event in events)
        memory = memory_curve(self._costs, static_bytes(self._costs, self._schedule.rank_of, rank), events)
        return RankTimeline(
            events=events,
            sends=tuple(self._sends[rank]),
            compute_s=compute_s,
            exposed_transfer_s=self._exposed_s[rank],
            bubble_s=max(0.0, makespan_s - compute_s - self._exposed_s[rank]),
            peak_bytes=max(point.held_bytes for point in memory),
            memory=memory,
        )


_Routes = dict[str, tuple[tuple[tuple[int, int, float], ...], ...]]
"""By what is moved (`F` or `I`; weight gradients move nothing) and stage: other stage, its rank, seconds."""


def _routes(schedule: PipelineSchedule, costs: PipelineCosts) -> tuple[dict[str, tuple[tuple[int, ...], ...]], _Routes]:
    """Return which stages each stage reads, and where its values go, for activations and for gradients."""
    near = neighbours(schedule.stages, costs.skips)
    nothing = ((),) * schedule.stages
    seconds = {(edge.source, edge.target): edge for edge in costs.edges}
    down = tuple(
        tuple((t, schedule.rank_of[t], seconds[s, t].forward_s) for t in targets)
        for s, targets in enumerate(near.targets)
    )
    up = tuple(
        tuple((s, schedule.rank_of[s], seconds[s, t].backward_s) for s in sources)
        for t, sources in enumerate(near.sources)
    )
    return {"F": near.sources, "I": near.targets, "W": nothing}, {"F": down, "I": up, "W": nothing}
