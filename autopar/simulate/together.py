"""Many cuts of one program under one schedule, simulated at once: when each rank ends, a number a cut.

The order of actions is the schedule's, whatever they cost. So one pass over it serves all cuts, each a place in every
array: what `engine.simulate` says of any of them alone, hundreds in the time that it takes for a few.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar.ir.schedule import Kind, PipelineSchedule
from autopar.ir.table import Floats
from autopar.simulate.errors import stuck
from autopar.simulate.replay import in_order, replay


class Together:
    """A schedule, ready to be simulated with the costs of many cuts.

    Ranks have a core each, compute while they send, and hand values to the next stage only.
    """

    def __init__(self, schedule: PipelineSchedule) -> None:
        """Raise `ScheduleError` where ranks wait for one another forever."""
        self._schedule = schedule.compute_only()
        replayed = replay(self._schedule)
        if replayed.waits:
            raise stuck(self._schedule, replayed.waits)
        self._order = list(in_order(self._schedule, replayed))

    @property
    def actions(self) -> int:
        """Return the computations of all ranks in a step."""
        return len(self._order)

    def ends_s(self, seconds: Mapping[Kind, Floats], down_s: Floats, up_s: Floats) -> Floats:
        """Return [rank, cut] when a rank's last computation ends.

        `seconds`: [stage, cut] of each kind of computation that the schedule has; `down_s`, `up_s`: [stage, cut] of
        sending a stage's value to the next, and its gradient to the one before.
        """
        schedule, rank_of = self._schedule, self._schedule.rank_of
        cuts = down_s.shape[1]
        free = [np.zeros(cuts) for _ in range(schedule.ranks)]
        wires: dict[tuple[int, int], Floats] = {}
        arrived: dict[tuple[int, bool, int], Floats] = {}
        for rank, (stage, kind, microbatch) in self._order:
            forward = kind == "F"
            came = None if kind == "W" else arrived.pop((stage, forward, microbatch), None)
            begun = free[rank] if came is None else np.maximum(free[rank], came)
            free[rank] = end = begun + seconds[kind][stage]
            to = stage + 1 if forward else stage - 1
            if kind == "W" or not 0 <= to < schedule.stages:
                continue
            other = rank_of[to]
            if other != rank:
                wire = wires.get((rank, other))
                sent = end if wire is None else np.maximum(end, wire)
                end = sent + (down_s if forward else up_s)[stage]
                wires[rank, other] = end
            arrived[to, forward, microbatch] = end
        return np.stack(free)
