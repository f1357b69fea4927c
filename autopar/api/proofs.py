"""What trials can be at best: their blocks as a fluid, under every schedule that the search could take.

Bounds of work alone know neither that recomputing less takes memory nor that pipelines fill, drain and hand over. These
do, at a few hundredths of a second a trial, where a relaxation of all layouts takes a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf, prod

import numpy as np

from autopar.api.crossings import least_handing
from autopar.api.floors import WAYS
from autopar.api.kinds import beside_data, shape_of
from autopar.api.pipelining import Wanted
from autopar.api.works import Works
from autopar.search.fluid import Flow, Fluid, Handing, Tight, least_step_s
from autopar.search.shared import Ranks, least_shared_s
from autopar.search.trials import Trial
from autopar.simulate.paths import Paths
from cost_models.cluster import ClusterSpec

_STEADY = 2
"""Micro-batches a rank of which a schedule is laid out: with more, no fewer are in flight."""

_ACTIONS = 20_000
"""Computations of a schedule at most that are gone through, in about 10 ms, for each of some ten chains."""

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

    def best(self, trial: Trial, ways: Sequence[Wanted], elsewhere_s: float, enough_s: float | None = None) -> Best:
        """Return the least that a trial can take with any of the schedules.

        `elsewhere_s`: what one micro-batch takes through all stages at least, collectives of tensors included.
        Nothing is known where kernels are fused. With `enough_s`, schedules that are not known to take as long are
        bounded by what waits for what in them, too.
        """
        solving, floors = self.works.solving, self.works.floors
        if solving.equal.device.fusion or not isinstance(trial.recompute, str):
            return Best(0.0, None)
        proven, places = solving.proves(trial), solving.places(trial.depth)
        clusters: Sequence[ClusterSpec | None] = (None,) if proven else places.clusters
        # Where devices are unlike, what micro-batches take on the slowest says nothing of the others.
        found = self._blocks(trial, clusters, elsewhere_s if proven else 0.0)
        if found is None:
            return Best(0.0, None)
        blocks, shared_s = (found[0], 0.0) if proven else (fastest(found), self._shared_s(trial, found))
        shape = shape_of(trial)
        replicas, width, count = shape.replicas, shape.width, shape.microbatches
        if trial.depth == 1:
            budget = solving.budget - solving.equal.device.reserved_bytes
            return Best(least_step_s(blocks, _flow(Wanted(1), min(count, _STEADY)), count, budget), None)
        budget = max(places.budgets) - min(places.reserved)
        sizes = tuple(axis.size for axis in trial.ranks)
        crossing_bytes = floors.crossing_bytes / (count * replicas * width)
        handing = least_of(least_handing(each, trial.depth, sizes, crossing_bytes) for each in places.clusters)
        best = Best(inf, None)
        for wanted in ways:
            if wanted.depth * wanted.interleave > int(blocks.counts.sum()):
                continue
            flow, share = _flow(wanted, min(count, _STEADY * wanted.depth)), solving.cluster.share
            least = partial(least_step_s, blocks, flow, count, budget, share=share, handing=handing)
            step_s = max(shared_s, least())
            if enough_s is not None and step_s < enough_s and 3 * wanted.depth * wanted.interleave * count <= _ACTIONS:
                step_s = max(step_s, least(tight=Tight(_paths(wanted, count), enough_s)))
            best = Best(min(step_s, best.step_s), wanted if step_s < _BETTER * best.step_s else best.wanted)
        return best if proven else Best(best.step_s, None)

    def work_s(self, trial: Trial) -> float:
        """Return seconds that a trial's work takes at least, 0 if nothing is known: one pricing for each kind of ranks.

        No sample costs less than its share of the whole batch at once; memory, stages' cuts and bubbles are no matter.
        """
        solving, batch = self.works.solving, self.works.solving.program.batch_size
        if solving.equal.device.fusion or not solving.proves(trial):
            return 0.0
        ranks = beside_data(trial)
        work, parts = self.works.of(max(1, batch), ranks), prod(axis.size for axis in trial.ranks if axis not in ranks)
        return 0.0 if work is None else work.least_s / (parts * solving.at_once(trial))

    def _blocks(
        self, trial: Trial, clusters: Sequence[ClusterSpec | None], elsewhere_s: float = 0.0
    ) -> list[Fluid] | None:
        """Return what blocks take and hold, on each of some devices alike; `None` if they have no price."""
        solving = self.works.solving
        shape, batch = shape_of(trial), solving.program.batch_size
        ranks = beside_data(trial)
        data = [axis for axis in trial.ranks if axis not in ranks]
        size = max(1, batch // (shape.microbatches * prod(axis.size for axis in data)))
        sharing = prod(axis.size for axis in data if axis.role == "dp_shard")
        found = [self.works.shared(size, ranks, sharing, cluster) for cluster in clusters]
        works = [each for each in found if each is not None]
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
                moved=self.works.moved(trial) if solving.proves(trial) else None,
            )
            for work in works
        ]

    def _shared_s(self, trial: Trial, found: Sequence[Fluid]) -> float:
        """Return the least of a pipeline whose ranks are on unlike devices, under any schedule.

        `found` is what blocks take and hold on each kind.
        """
        solving = self.works.solving
        places = solving.places(trial.depth)
        kinds = [
            Ranks(blocks, places.kind_of.count(kind), solving.budget_of(cluster) - cluster.device.reserved_bytes)
            for kind, (blocks, cluster) in enumerate(zip(found, places.clusters, strict=True))
        ]
        return least_shared_s(kinds, shape_of(trial).microbatches)


def fastest(kinds: Sequence[Fluid]) -> Fluid:
    """Return blocks that take as long as on the device where each part of each takes least.

    No pipeline of these fills and drains faster, whichever blocks of ranks come first.
    """
    return replace(
        kinds[0],
        forward_s=np.minimum.reduce([each.forward_s for each in kinds]),
        input_gradient_s=np.minimum.reduce([each.input_gradient_s for each in kinds]),
        weight_gradient_s=np.minimum.reduce([each.weight_gradient_s for each in kinds]),
        again_s=np.minimum.reduce([each.again_s for each in kinds]),
    )


def least_of(found: Iterable[Handing]) -> Handing:
    """Return the least of what handing takes over each of some links."""
    least, most, path, host = zip(*((h.least_s, h.most_s, h.path_s, h.host_s) for h in found), strict=True)
    return Handing(min(least), min(most), min(path), min(host))


@lru_cache(maxsize=64)
def _paths(wanted: Wanted, microbatches: int) -> Paths:
    """Return what waits for what in a schedule."""
    return Paths(wanted.schedule_for(microbatches))


@lru_cache(maxsize=1024)
def _flow(wanted: Wanted, microbatches: int) -> Flow:
    """Return what a schedule has in flight."""
    return Flow.of(wanted.schedule_for(microbatches))
