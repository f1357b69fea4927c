"""What trials can be at best: their blocks as a fluid, under every schedule that the search could take.

Bounds of work alone know neither that recomputing less takes memory nor that pipelines fill, drain and hand over. These
do, at a few hundredths of a second a trial, where a relaxation of all layouts takes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from autopar.api.crossings import least_handing
from autopar.api.floors import WAYS
from autopar.api.kinds import is_settled, shape_of
from autopar.api.pipelining import Wanted
from autopar.api.works import Works
from autopar.search.fluid import Flow, least_step_s
from autopar.search.trials import Trial

_STEADY = 2
"""Micro-batches a rank of which a schedule is laid out: with more, no fewer are in flight."""

_BETTER = 0.99
"""How much less a schedule has to take than those before it, which are simpler, to be tried in their place."""


@dataclass(frozen=True)
class Best:
    """What a trial can be at best."""

    step_s: float
    """No plan of it is faster; infinite if none fits, 0 if nothing is known."""

    wanted: Wanted | None
    """The schedule that this is of; `None` without stages."""


@dataclass
class Proofs:
    """Bounds of the trials of one search."""

    works: Works
    mixes: bool
    """Whether blocks may be recomputed each in its way."""

    def best(self, trial: Trial, ways: Sequence[Wanted], elsewhere_s: float) -> Best:
        """Return the least that a trial can take with any of the schedules.

        `elsewhere_s`: what one micro-batch takes through all stages at least, collectives of tensors included.
        Nothing is known where devices are unlike, where kernels are fused, and of axes that may split more than tensors
        do or batches: free ones and those of tokens.
        """
        solving, floors = self.works.solving, self.works.floors
        if not solving.proves(trial) or solving.equal.device.fusion or not isinstance(trial.recompute, str):
            return Best(0.0, None)
        if not is_settled(trial):
            return Best(0.0, None)
        shape = shape_of(trial)
        replicas, width, count = shape.replicas, shape.width, shape.microbatches
        size = max(1, solving.program.batch_size // (count * replicas))
        work = self.works.of(size, width)
        if work is None:
            return Best(0.0, None)
        allowed = WAYS if self.mixes and trial.recompute == "full" else (trial.recompute,)
        blocks = floors.blocks(
            work,
            allowed,
            parts=count * replicas * width,
            shards=shape.shards * width,
            sums=count > 1,
            elsewhere_s=elsewhere_s,
        )
        if trial.depth == 1:
            budget = solving.budget - solving.equal.device.reserved_bytes
            return Best(least_step_s(blocks, _flow(Wanted(1), min(count, _STEADY)), count, budget), None)
        places = solving.places(trial.depth)
        budget = max(places.budgets) - min(places.reserved)
        sizes = tuple(axis.size for axis in trial.ranks)
        crossing_bytes = floors.crossing_bytes / (count * replicas * width)
        handing = least_handing(solving.equal, trial.depth, sizes, crossing_bytes)
        found = Best(inf, None)
        for wanted in ways:
            if wanted.depth * wanted.interleave > int(blocks.counts.sum()):
                continue
            flow, share = _flow(wanted, min(count, _STEADY * wanted.depth)), solving.cluster.share
            step_s = least_step_s(blocks, flow, count, budget, share=share, handing=handing)
            found = Best(min(step_s, found.step_s), wanted if step_s < _BETTER * found.step_s else found.wanted)
        return found


@lru_cache(maxsize=1024)
def _flow(wanted: Wanted, microbatches: int) -> Flow:
    """Return what a schedule has in flight."""
    return Flow.of(wanted.schedule_for(microbatches))
