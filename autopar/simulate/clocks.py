"""The clocks of all ranks while the actions of a pipeline go by: when inputs arrive, what is sent, what is idle."""

from __future__ import annotations

from collections import defaultdict

from autopar.ir.pipeline import PipelineCosts
from autopar.ir.schedule import Action, Kind, PipelineSchedule
from autopar.ir.timeline import COMPUTE_STREAM, Event, RankTimeline, Timeline
from autopar.simulate.memory import memory_curve, static_bytes
from autopar.simulate.replay import neighbours


class Clocks:
    """When each rank is free and what has arrived where, and from that the timeline.

    A rank's computations are begun and ended in order, each when all that it reads is made.
    """

    def __init__(self, schedule: PipelineSchedule, costs: PipelineCosts, *, blocking: bool) -> None:
        """With `blocking` a sender computes nothing until its message has arrived."""
        self._blocking = blocking
        self._costs = costs
        self._schedule = schedule
        self._reads, self._feeds = _routes(schedule, costs)
        self._free_s = [0.0] * schedule.ranks
        self._wire_free_s: dict[tuple[int, int], float] = defaultdict(float)
        # By (target stage, source stage, "F" or "I", micro-batch): when the value was made, when it arrived.
        self._arrived_s: dict[tuple[int, int, str, int], tuple[float, float]] = {}
        self._events: list[list[Event]] = [[] for _ in range(schedule.ranks)]
        self._sends: list[list[Event]] = [[] for _ in range(schedule.ranks)]
        self._exposed_s = [0.0] * schedule.ranks

    def ready_s(self, rank: int, action: Action) -> float | None:
        """Return when a rank can begin its next computation; `None` while something that it reads is not made yet."""
        stage, kind, microbatch = action
        way = _way(kind)
        ready_s = self._free_s[rank]
        for source in self._reads[way][stage]:
            key = (stage, source, way, microbatch)
            if key not in self._arrived_s:
                return None
            ready_s = max(ready_s, self._arrived_s[key][1])
        return ready_s

    def begin(self, rank: int, action: Action) -> float:
        """Return when a rank begins its next computation, and take note of what it waited for; inputs are made."""
        stage, kind, microbatch = action
        way = _way(kind)
        free_s = self._free_s[rank]
        start_s = free_s
        last_made_s = free_s
        for source in self._reads[way][stage]:
            made_s, arrived_s = self._arrived_s.pop((stage, source, way, microbatch))
            if arrived_s > start_s:
                start_s, last_made_s = arrived_s, made_s
        self._exposed_s[rank] += start_s - max(free_s, last_made_s) if start_s > free_s else 0.0
        return start_s

    def end(self, rank: int, action: Action, start_s: float, end_s: float) -> None:
        """Put a computation on its rank's stream, and send what it makes."""
        stage, kind, microbatch = action
        way = _way(kind)
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


def _way(kind: Kind) -> str:
    """Return what a computation reads and makes: a full backward moves what an input gradient does."""
    return "I" if kind == "B" else kind


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
