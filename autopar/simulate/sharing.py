"""The computations of ranks that share cores, one event after another: rates change when a rank starts or stops.

Between events all rates are constant, so that when the next computation ends is known; it is found again when a rank
starts, or ends earlier. A computation is work, which takes a core, and then the waiting that belongs to it
(collectives inside the stage), which takes none. Work grows with actions times ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from autopar.ir.cores import SharedCores
from autopar.ir.pipeline import PipelineCosts
from autopar.ir.schedule import Action, PipelineSchedule
from autopar.simulate.clocks import Clocks
from cost_models.cluster import ClusterSpec


@dataclass(slots=True)
class _Task:
    """A computation under way."""

    action: Action
    start_s: float
    since_s: float
    """From when on the rate holds."""

    left_s: float
    """Of the work, at that moment, with a core of its own."""

    waiting_s: float
    """What follows the work."""

    rate: float = 1.0

    @property
    def end_s(self) -> float:
        """Return when the work ends if no rate changes."""
        return self.since_s + self.left_s / self.rate

    def at_rate(self, now_s: float, rate: float) -> None:
        """Go on at another rate."""
        if rate != self.rate:
            self.left_s = max(0.0, self.left_s - (now_s - self.since_s) * self.rate)
            self.since_s, self.rate = now_s, rate


def shared_cores(cluster: ClusterSpec, width: int) -> SharedCores | None:
    """Return the cores that pipeline ranks of `width` ranks each share on a cluster; none where each rank has one."""
    found = cluster.shared_cores
    return SharedCores(found[0], found[1], width) if found else None


def run_sharing(clocks: Clocks, schedule: PipelineSchedule, costs: PipelineCosts, shared: SharedCores) -> None:
    """Put all computations of a schedule that runs to its end on the clocks."""
    run = _Sharing(clocks, schedule, costs, shared)
    while run.advance():
        pass


class _Sharing:
    """What each rank does at a moment: its next action, at work, or waiting at the end of an action."""

    def __init__(self, clocks: Clocks, schedule: PipelineSchedule, costs: PipelineCosts, shared: SharedCores) -> None:
        self._clocks = clocks
        self._costs = costs
        self._shared = shared
        self._rows: list[Iterator[Action]] = [iter(row) for row in schedule.actions]
        self._next: dict[int, Action] = {}
        self._at_work: dict[int, _Task] = {}
        self._waiting: dict[int, tuple[float, _Task]] = {}
        for rank in range(schedule.ranks):
            self._take(rank)

    def advance(self) -> bool:
        """Go to the next moment at which something ends or starts, ends first; false if there is none."""
        ended_s, ended = _first((task.end_s, rank) for rank, task in self._at_work.items())
        waited_s, waited = _first((end_s, rank) for rank, (end_s, _) in self._waiting.items())
        started_s, started = _first(self._startable())
        now_s = min(ended_s, waited_s, started_s)
        if now_s == inf:
            return False
        if waited_s == now_s:
            self._done(waited, self._waiting.pop(waited)[1], now_s)
        elif ended_s == now_s:
            task = self._at_work.pop(ended)
            self._settle_rates(now_s)
            if task.waiting_s:
                self._waiting[ended] = (now_s + task.waiting_s, task)
            else:
                self._done(ended, task, now_s)
        else:
            action = self._next.pop(started)
            start_s = self._clocks.begin(started, action)
            cost = self._costs.stages[action.stage]
            waiting_s = cost.waiting_s(action.kind)
            self._at_work[started] = _Task(action, start_s, start_s, cost.seconds(action.kind) - waiting_s, waiting_s)
            self._settle_rates(now_s)
        return True

    def _startable(self) -> Iterator[tuple[float, int]]:
        for rank, action in self._next.items():
            ready_s = self._clocks.ready_s(rank, action)
            if ready_s is not None:
                yield ready_s, rank

    def _settle_rates(self, now_s: float) -> None:
        rates = self._shared.rates(self._at_work)
        for rank, task in self._at_work.items():
            task.at_rate(now_s, rates[rank])

    def _done(self, rank: int, task: _Task, now_s: float) -> None:
        self._clocks.end(rank, task.action, task.start_s, now_s)
        self._take(rank)

    def _take(self, rank: int) -> None:
        action = next(self._rows[rank], None)
        if action is not None:
            self._next[rank] = action


def _first(moments: Iterator[tuple[float, int]]) -> tuple[float, int]:
    return min(moments, default=(inf, -1))
