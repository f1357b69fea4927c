"""The way through a schedule that takes longest: how often it passes each stage's computations.

A step takes at least as long as any chain of computations that wait for one another, and that is linear in what stages
take. So the chains that are longest for some costs bound the step for all others, too (cutting planes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.schedule import PipelineSchedule
from autopar.ir.table import Floats, Ints
from autopar.simulate.replay import in_order, replay

_PARTS = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}
"""Of forward, input gradient and weight gradient, what each kind of computation is."""


@dataclass(frozen=True)
class Path:
    """A chain of computations that wait for one another."""

    passes: Ints
    """[3, stage]: how often it passes a stage's forward, input gradient, weight gradient."""

    handed: int
    """How often it goes from rank to rank."""


class Paths:
    """A schedule that runs to its end, ready to be asked for its longest path under many costs."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        schedule = schedule.compute_only()
        self._stages = schedule.stages
        self._parts: list[tuple[str, int]] = []
        self._before: list[int] = []
        self._source: list[int] = []
        self._remote: list[bool] = []
        last = [-1] * schedule.ranks
        made: dict[tuple[int, bool, int], int] = {}
        for at, (rank, (stage, kind, microbatch)) in enumerate(in_order(schedule, replay(schedule))):
            forward = kind == "F"
            beside = stage - 1 if forward else stage + 1
            source = -1 if kind == "W" else made.get((beside, forward, microbatch), -1)
            self._parts.append((kind, stage))
            self._before.append(last[rank])
            self._source.append(source)
            self._remote.append(source >= 0 and schedule.rank_of[beside] != rank)
            last[rank] = at
            if kind != "W":
                made[stage, forward, microbatch] = at

    def longest(self, seconds: Floats, handed_s: float = 0.0) -> Path:
        """Return the path that takes longest: `seconds` are [3, stage] of each part, `handed_s` of going to a rank."""
        took = {
            (kind, stage): float(sum(seconds[part][stage] for part in parts))
            for kind, parts in _PARTS.items()
            for stage in range(self._stages)
        }
        ends: list[float] = []
        through: list[int] = []
        for key, before, source, remote in zip(self._parts, self._before, self._source, self._remote, strict=True):
            free_s = ends[before] if before >= 0 else 0.0
            came_s = ends[source] + (handed_s if remote else 0.0) if source >= 0 else 0.0
            waits = came_s > free_s
            ends.append((came_s if waits else free_s) + took[key])
            through.append(source if waits else before)
        passes = np.zeros((3, self._stages), dtype=np.int64)
        handed, at = 0, int(np.argmax(ends))
        while at >= 0:
            kind, stage = self._parts[at]
            passes[list(_PARTS[kind]), stage] += 1
            handed += self._remote[at] and through[at] == self._source[at]
            at = through[at]
        return Path(passes, handed)
