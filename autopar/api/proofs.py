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
from autopar.search.fluid import Flow, Fluid, least_step_s
from autopar.search.shared import Ranks, least_shared_s
from autopar.search.trials import Trial
from cost_models.cluster import ClusterSpec

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
        Nothing is known where kernels are fused, and of axes that may split more than tensors do or batches: free ones
        and those of tokens.
        """
        solving, floors = self.works.solving, self.works.floors
        if solving.equal.device.fusion or not isinstance(trial.recompute, str) or not is_settled(trial):
            return Best(0.0, None)
        if not solving.proves(trial):
            return Best(self._unlike_s(trial), None)
        alike = self._blocks(trial, (None,), elsewhere_s)
        if alike is None:
            return Best(0.0, None)
        blocks = alike[0]
        shape = shape_of(trial)
        replicas, width, count = shape.replicas, shape.width, shape.microbatches
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

    def _blocks(
        self, trial: Trial, clusters: Sequence[ClusterSpec | None], elsewhere_s: float = 0.0
    ) -> list[Fluid] | None:
        """Return what blocks take and hold, on each of some devices alike; `None` if they have no price."""
        shape, batch = shape_of(trial), self.works.solving.program.batch_size
        size = max(1, batch // (shape.microbatches * shape.replicas))
        works = [work for cluster in clusters if (work := self.works.of(size, shape.width, cluster)) is not None]
        if len(works) < len(clusters) or not isinstance(trial.recompute, str):
            return None
        allowed = WAYS if self.mixes and trial.recompute == "full" else (trial.recompute,)
        return [
            self.works.floors.blocks(
                work,
                allowed,
                parts=shape.microbatches * shape.replicas * shape.width,
                shards=shape.shards * shape.width,
                sums=shape.microbatches > 1,
                elsewhere_s=elsewhere_s,
                beside=works if len(works) > 1 else (),
            )
            for work in works
        ]

    def _unlike_s(self, trial: Trial) -> float:
        """Return the least of a pipeline whose ranks are on unlike devices, under any schedule."""
        solving = self.works.solving
        places = solving.places(trial.depth)
        found = self._blocks(trial, places.clusters)
        if found is None:
            return 0.0
        kinds = [
            Ranks(blocks, places.kind_of.count(kind), solving.budget_of(cluster) - cluster.device.reserved_bytes)
            for kind, (blocks, cluster) in enumerate(zip(found, places.clusters, strict=True))
        ]
        return least_shared_s(kinds, shape_of(trial).microbatches)


@lru_cache(maxsize=1024)
def _flow(wanted: Wanted, microbatches: int) -> Flow:
    """Return what a schedule has in flight."""
    return Flow.of(wanted.schedule_for(microbatches))
