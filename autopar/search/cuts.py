"""Where a program is cut into pipeline stages: the best cuts for a closed form, for the simulator to decide among."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autopar.ir.pipeline import Edge, PipelineCosts, StageCost
from autopar.ir.schedule import PipelineSchedule
from autopar.search.interleaved import Bounded, least_bytes_interleaved, least_step_interleaved
from autopar.search.neighbours import nearby
from autopar.search.stages import Assigned, Boundary, Stages, Unit, kept_bytes, temporary_bytes
from autopar.search.threshold import Chain, least_largest, least_step


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut the program into stages."""

    first_units: tuple[int, ...]
    """The first unit of each stage; stages are numbered over all ranks, as in the schedule."""

    step_s: float
    """By the closed form, see `closed_forms`; without optimizer step and gradient reductions."""

    rank_bytes: tuple[int, ...]
    """The most that each rank holds, temporaries of its largest unit included."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The best cut found, and others near it."""

    cuts: tuple[Cut, ...]
    """Shortest predicted step first; of equals, the more even ranks first."""

    bound_s: float
    """No cut within the budget has a shorter predicted step."""

    @property
    def gap(self) -> float:
        """Return how much shorter, relative, the best step could be."""
        step_s = self.cuts[0].step_s
        return max(0.0, (step_s - self.bound_s) / step_s) if step_s else 0.0

    @property
    def proven(self) -> bool:
        """Return whether the first cut is optimal for the closed form."""
        return self.gap <= _PROVEN


@dataclass(frozen=True, slots=True)
class NoCut:
    """No cut within the budget was found."""

    least_bytes: int
    """What the largest rank needs with the thriftiest cut known."""

    bound_bytes: int
    """What it needs at least, whatever the cut; above the budget: proven that none fits."""


_TELLS = 0.01
"""Share of a step that transfers add from which it is worth knowing which cut another closed form takes."""

_PROVEN = 1e-9
"""Gap, relative, of what is proven: what rounding leaves."""


def find_cuts(
    units: Sequence[Unit],
    boundaries: Sequence[Boundary],
    schedule: PipelineSchedule,
    *,
    budget_bytes: float,
    keep: int = 5,
    blocking: bool = False,
) -> Cuts | NoCut:
    """Return the cuts of `units`, in program order, with the shortest predicted steps within the budget of each rank.

    `schedule` gives ranks, stages a rank, micro-batches, the closed form (by its name) and what each rank holds (by its
    actions). `blocking`: ranks compute nothing while they send, see `simulate`. With one stage a rank, or some ten
    thousand cuts at most, the first is optimal for the closed form, else within `gap`; the others, up to `keep` in all,
    differ from it by some units, for the simulator to decide among. Where transfers tell and the schedule has another
    closed form, as many more are the best by that. Raises `UsageError` for a schedule without a closed form, or too few
    units.
    """
    assigned = Assigned.alike(units, boundaries, schedule)
    return find_cuts_on(assigned, schedule, budget_bytes=budget_bytes, keep=keep, blocking=blocking)


def find_cuts_on(
    assigned: Assigned, schedule: PipelineSchedule, *, budget_bytes: float, keep: int = 5, blocking: bool = False
) -> Cuts | NoCut:
    """Return the same for ranks whose devices and links may differ.

    `budget_bytes` is that of the devices that hold most. `NoCut` counts what others have less as needed.
    """
    stages = Stages(assigned, schedule, blocking=blocking)
    alone = stages.stages == stages.ranks
    found = _least_step(stages, budget_bytes) if alone else least_step_interleaved(stages, budget_bytes)
    if not found.cuts:
        return _no_cut(stages)
    last = found.cuts[min(1, len(found.cuts) - 1)]
    near = nearby(stages, last, budget_bytes, max(1, keep))
    rows = list(dict.fromkeys(tuple(cut.tolist()) for cut in (*found.cuts, *near)))[: max(1, keep)]
    if alone and stages.waiting_s(found.cuts[0]) > _TELLS * float(stages.score(found.cuts[0][None]).step_s[0]):
        rows += [each for each in _halving(stages, budget_bytes, max(1, keep)) if each not in rows]
    cuts = np.array(rows)
    scores = stages.score(cuts)
    order = np.lexsort((scores.imbalance, scores.step_s))
    return Cuts(
        tuple(
            Cut(
                stages.first_units(cuts[each]),
                float(scores.step_s[each]),
                tuple(int(count) for count in scores.rank_bytes[each] - stages.less_bytes),
            )
            for each in order
        ),
        min(found.bound_s, float(scores.step_s.min())),
    )


def even_cut(count: int, stages: int) -> tuple[int, ...]:
    """Return the first block of each stage where blocks are spread as evenly as can be.

    Frameworks whose layers do not divide count embedding and head as a layer each (Megatron-DeepSpeed's partitions by
    `type:transformer|embedding`, Megatron-Core's `account_for_..._in_pipeline_split`, torchtitan's weights of first and
    last stage): 126 layers on 16 stages are 7, 14 times 8, and 7.
    """
    each, more = divmod(count + 2, stages)
    sizes = [each + (stage < more) for stage in range(stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    if count % stages == 0 or min(sizes) < 1:
        return tuple(stage * count // stages for stage in range(stages))
    return tuple(accumulate(sizes[:-1], initial=0))


def pipeline_costs(
    units: Sequence[Unit],
    boundaries: Sequence[Boundary],
    schedule: PipelineSchedule,
    first_units: Sequence[int],
    on_rank: Sequence[Sequence[Unit]] | None = None,
) -> PipelineCosts:
    """Return what the simulator reads of a cut: sums over units, and the transfers from each stage to the next.

    Values that pass over a stage travel through it, as part of its boundaries; what messages take from a core that
    computes is part of the computations that make and read them. Static bytes hold the temporaries of the
    rank's largest unit, so that a simulated rank's peak is `Cut.rank_bytes`. `on_rank`: the units as each rank has
    them, where ranks have unlike devices.
    """
    stops = (*first_units[1:], len(units))
    own_units = [units if on_rank is None else on_rank[rank] for rank in schedule.rank_of]
    runs = [mine[start:stop] for mine, start, stop in zip(own_units, first_units, stops, strict=True)]
    temporary = [max(temporary_bytes(unit, schedule) for unit in run) for run in runs]
    edges = [boundaries[start - 1] for start in first_units[1:]]
    made = []
    for stage, (run, rank) in enumerate(zip(runs, schedule.rank_of, strict=True)):
        own = [each for each, owner in enumerate(schedule.rank_of) if owner == rank]
        remote = stage > 0 and schedule.rank_of[stage - 1] != rank
        received = edges[stage - 1].value_bytes if remote else 0
        handled_s = edges[stage - 1].host_s if remote else 0.0
        if stage + 1 < len(runs) and schedule.rank_of[stage + 1] != rank:
            handled_s += edges[stage].host_s
        made.append(
            StageCost(
                forward_s=sum(unit.forward_s for unit in run) + handled_s,
                input_gradient_s=sum(unit.input_gradient_s for unit in run) + handled_s,
                weight_gradient_s=sum(unit.weight_gradient_s for unit in run),
                forward_waiting_s=sum(unit.forward_waiting_s for unit in run),
                input_gradient_waiting_s=sum(unit.input_gradient_waiting_s for unit in run),
                weight_gradient_waiting_s=sum(unit.weight_gradient_waiting_s for unit in run),
                static_bytes=sum(unit.static_bytes for unit in run)
                + (max(temporary[each] for each in own) if stage == own[0] else 0),
                activation_bytes=sum(unit.activation_bytes for unit in run) + received,
                kept_bytes=sum(kept_bytes(unit) for unit in run) + received,
            )
        )
    return PipelineCosts(
        tuple(made),
        tuple(Edge(stage, stage + 1, edge.forward_s, edge.backward_s) for stage, edge in enumerate(edges)),
    )


def _least_step(stages: Stages, budget_bytes: float) -> Bounded:
    """Return the optimal cut where every stage has a rank of its own."""
    fill, key = list(stages.fill), list(stages.key)
    too_large = [stages.exists & (stages.stage_bytes(stage) > budget_bytes) for stage in range(stages.stages)]
    cut = least_step(
        Chain(
            [fill[kind] for kind in stages.kind_of],
            [key[kind] for kind in stages.kind_of],
            [banned if banned.any() else None for banned in too_large],
        )
    )
    return Bounded((), np.inf) if cut is None else Bounded((cut,), float(stages.score(cut[None]).step_s[0]))


def _halving(stages: Stages, budget_bytes: float, keep: int) -> list[tuple[int, ...]]:
    """Return the best cuts by the closed form that halves boundaries, none where the schedule has no such form."""
    other = stages.halving()
    if other is None:
        return []
    best = _least_step(other, budget_bytes).cuts[:1]
    return [tuple(near.tolist()) for cut in best for near in nearby(other, cut, budget_bytes, keep)]


def _no_cut(stages: Stages) -> NoCut:
    if stages.stages == stages.ranks:
        least = int(least_largest(stages.stage_bytes(stage) for stage in range(stages.stages))[0])
        return NoCut(least, least)
    bound, cut = least_bytes_interleaved(stages)
    return NoCut(int(stages.score(cut[None]).rank_bytes.max()), int(np.ceil(bound)))
