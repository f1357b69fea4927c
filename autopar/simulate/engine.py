"""A schedule and the costs of its stages become a timeline: when each rank computes, sends, waits, and what it holds.

Every rank has one compute stream, which runs its actions in order, and one stream for what it sends to each other rank,
which moves one message at a time. A computation starts when the rank is free and its inputs have arrived. Times follow
in one pass over the actions, producers first, so the work is proportional to their number; only where ranks share cores
does a rank's rate depend on what the others do meanwhile, see `simulate.sharing`.

Not modelled: links that several streams share, computation slowed by transfers beside it, launch overheads, received
values that wait in buffers, and temporary memory inside a computation.
"""

from __future__ import annotations

from autopar.ir.cores import SharedCores
from autopar.ir.pipeline import PipelineCosts
from autopar.ir.schedule import PipelineSchedule
from autopar.ir.timeline import Timeline
from autopar.simulate.clocks import Clocks
from autopar.simulate.errors import other_stages, stuck
from autopar.simulate.memory import COMPUTATIONS
from autopar.simulate.replay import in_order, replay
from autopar.simulate.sharing import run_sharing


def simulate(
    schedule: PipelineSchedule, costs: PipelineCosts, *, blocking: bool = False, shared: SharedCores | None = None
) -> Timeline:
    """Return the timeline of one step.

    Values are sent as soon as they are made, whatever sends and receives the schedule writes out. With `blocking` the
    sender computes nothing until its message has arrived; else transfers run beside computation. Stages of one rank
    hand over for nothing. Costs are those of ranks with a core each; with `shared` cores, ranks that compute at the
    same time slow one another down. Raises `ScheduleError` where ranks wait for one another forever, see `check`.
    """
    if len(costs.stages) != schedule.stages:
        raise other_stages(schedule, len(costs.stages))
    schedule = schedule.compute_only()
    replayed = replay(schedule, costs.skips)
    if replayed.waits:
        raise stuck(schedule, replayed.waits)
    clocks = Clocks(schedule, costs, blocking=blocking)
    if shared is not None:
        run_sharing(clocks, schedule, costs, shared)
        return clocks.timeline()
    seconds = {(stage, kind): cost.seconds(kind) for stage, cost in enumerate(costs.stages) for kind in COMPUTATIONS}
    for rank, action in in_order(schedule, replayed):
        start_s = clocks.begin(rank, action)
        clocks.end(rank, action, start_s, start_s + seconds[action.stage, action.kind])
    return clocks.timeline()
