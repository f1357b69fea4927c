"""Sends and receives of a schedule that says only what is computed."""

from __future__ import annotations

from autopar.ir.pipeline import PipelineCosts
from autopar.ir.schedule import Action, Kind, PipelineSchedule
from autopar.simulate.engine import simulate
from autopar.simulate.replay import in_order, neighbours, replay

_TRANSFERS: dict[Kind, tuple[Kind, Kind]] = {
    "F": ("SEND_F", "RECV_F"),
    "B": ("SEND_B", "RECV_B"),
    "I": ("SEND_B", "RECV_B"),
}


def with_transfers(schedule: PipelineSchedule, costs: PipelineCosts) -> PipelineSchedule:
    """Return the schedule with sends and receives written out, in one order that all ranks share.

    Computations are taken by their end in time; each value is sent at once, and its receive stands where the receiving
    rank is then. A stage that reads several stages has one receive, where the last of them sends. As all rows are parts
    of one sequence, sends and receives of a pair of ranks match, also where a send waits for its receive; skip
    connections need a channel of their own, see `check`. Raises `ScheduleError` where ranks wait forever.
    """
    schedule = schedule.compute_only()
    timeline = simulate(schedule, costs)
    near = neighbours(schedule.stages, costs.skips)
    rows: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    awaited: dict[Action, int] = {}
    # Equal ends occur where a computation takes no time: the replayed order, producers first, breaks the tie.
    replayed = replay(schedule, costs.skips)
    place = {action: i for i, (_, action) in enumerate(in_order(schedule, replayed))}
    events = (event for rank in timeline.ranks for event in rank.events)
    for event in sorted(events, key=lambda event: (event.end_s, place[event.action])):
        stage, kind, microbatch = event.action
        rows[event.rank].append(event.action)
        if kind == "W":
            continue
        send, receive = _TRANSFERS[kind]
        ends, origins = (near.targets, near.sources) if kind == "F" else (near.sources, near.targets)
        remote = [other for other in ends[stage] if schedule.rank_of[other] != event.rank]
        if remote:
            rows[event.rank].append(Action(stage, send, microbatch))
        for other in remote:
            to = schedule.rank_of[other]
            action = Action(other, receive, microbatch)
            left = awaited.get(action, sum(schedule.rank_of[origin] != to for origin in origins[other])) - 1
            awaited[action] = left
            if not left:
                rows[to].append(action)
    return PipelineSchedule(schedule.rank_of, schedule.microbatches, tuple(map(tuple, rows)), schedule.name)
