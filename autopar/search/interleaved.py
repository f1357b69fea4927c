"""Cuts where a rank has several stages, so that no path over units knows what its other stages cost: with a bound.

Where cuts are few, all are scored. Else what a rank's stages share is relaxed. The largest of the ranks' keys is at
least any mean of them with weights that sum to 1; bytes above the budget are priced instead of forbidden. What is left
is a shortest path, exact, and so is each bound that it gives (Lagrangian relaxation; prices by subgradients with
Polyak's steps). The cuts come from climbing: from the most even stages, and from the paths that the bound's prices lead
to.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from autopar.ir.table import Floats, Ints
from autopar.search.neighbours import Goal, climb, step
from autopar.search.stages import Scores, Stages
from autopar.search.threshold import Chain, least_largest, least_step, shortest

_ROUNDS = 60
"""Prices tried."""

_PATIENCE = 5
"""Rounds without a better bound after which steps are halved."""

_CLIMBS = 3
"""Paths from which is climbed."""

_FEW = 10_000
"""Cuts that are scored one and all, within 0.1 s: those of 32 layers into four stages, of 16 into eight."""

_CLOSE = 1e-9
"""Gap, relative, at which the search ends."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """Cuts within the budget, and what none can beat."""

    cuts: tuple[Ints, ...]
    """That with the shortest predicted step first; empty: none was found."""

    bound_s: float


def least_step_interleaved(stages: Stages, budget_bytes: float) -> Bounded:
    """Return a cut with a short predicted step, cuts that may well be shorter in truth, and a bound on the predictions.

    In truth the stages of a rank make up for one another in part only. In simulations the best cuts are those with a
    short mean of the predicted step and the paced one, see `Scores`.
    """
    if comb(stages.units - 1, stages.stages - 1) <= _FEW:
        return _least_of_all(stages, budget_bytes)
    search = _Search(stages, budget_bytes)
    even = search.even()
    search.offer(even)
    if search.best is None:
        even = least_bytes_interleaved(stages)[1]
        search.offer(even)
    search.tighten()
    if search.best is None:
        return Bounded((), search.bound_s)
    climbed = [climb(stages, even, budget_bytes, goal) for goal in _GOALS]
    fitting = [cut for cut in climbed if stages.score(cut[None]).rank_bytes.max() <= budget_bytes]
    return Bounded((search.best, *fitting), min(search.bound_s, search.best_s))


def _least_of_all(stages: Stages, budget_bytes: float) -> Bounded:
    """Return the optimal cut, and the best by what else says that a cut is short."""
    cuts = all_cuts(stages)
    scores = stages.score(cuts)
    fits = np.flatnonzero(scores.rank_bytes.max(axis=1) <= budget_bytes)
    if not len(fits):
        return Bounded((), np.inf)
    cuts, scores = cuts[fits], Scores(*(each[fits] for each in scores))
    best = [int(np.lexsort((scores.imbalance, goal(scores)))[0]) for goal in (step, *_GOALS)]
    return Bounded(tuple(cuts[each] for each in best), float(scores.step_s[best[0]]))


def all_cuts(stages: Stages) -> Ints:
    """Return every cut, a row each."""
    inner = list(combinations(range(1, stages.units), stages.stages - 1))
    cuts = np.full((len(inner), stages.stages + 1), stages.units, dtype=np.int64)
    cuts[:, 0], cuts[:, 1:-1] = 0, np.array(inner, dtype=np.int64).reshape(len(inner), -1)
    return cuts


_GOALS: tuple[Goal, ...] = (
    lambda scores: scores.step_s + scores.paced_s,
    lambda scores: scores.paced_s,
    lambda scores: 9 * scores.step_s + scores.paced_s,
)
"""What cuts for the simulator are good at, the likeliest first."""


def least_bytes_interleaved(stages: Stages) -> tuple[float, Ints]:
    """Return a bound on the bytes of the largest rank, over all cuts, and a cut with few."""
    if comb(stages.units - 1, stages.stages - 1) <= _FEW:
        cuts = all_cuts(stages)
        most = stages.score(cuts).rank_bytes.max(axis=1)
        return float(most.min()), cuts[int(most.argmin())]
    single, cut = least_largest(stages.stage_bytes(stage) for stage in range(stages.stages))
    moments = [held[held.sum(axis=(1, 2)).argmax()] for held in stages.held]
    saved = [stages.saved(kind) for kind in range(len(stages.fill))]
    costs = [
        np.where(stages.exists, stages.static + np.tensordot(moments[rank][slot], saved[kind], axes=1), np.inf)
        for (rank, slot), kind in zip(stages.slots, stages.kind_of, strict=True)
    ]
    mean = shortest(costs)[0] / stages.ranks + float(stages.less_bytes.mean())
    return max(single, mean), climb(stages, cut, mean)


class _Search:
    """The best cut and the best bound so far, and the prices that led to them."""

    def __init__(self, stages: Stages, budget_bytes: float) -> None:
        self.stages, self.budget_bytes = stages, budget_bytes
        self.best: Ints | None = None
        self.best_s = self.bound_s = np.inf
        self._banned = [stages.stage_bytes(stage) > budget_bytes for stage in range(stages.stages)]
        self._saved = [stages.saved(kind) for kind in range(len(stages.fill))]
        self._groups = int(stages.group_of.max()) + 1
        self._weight = np.full(self._groups, 1 / self._groups)
        self._key: Floats = np.where(stages.exists, stages.key, 0.0)
        self._price = np.zeros(stages.held.shape[:2])
        """Of each rank and moment, s for each byte above the budget."""

    def even(self) -> Ints:
        """Return the cut with the shortest step if every stage were a group of its own, whatever memory it takes.

        So it is the shortest of all where stages are, and the bound is its step.
        """
        stages = self.stages
        fill, key = list(stages.fill), list(stages.key)
        kinds = stages.kind_of
        cut = least_step(Chain([fill[k] for k in kinds], [key[k] for k in kinds], (None,) * stages.stages))
        if cut is None:
            raise ValueError("there are as many units as stages and no budget, so some cut exists")
        self.bound_s = float(stages.score(cut[None]).step_s[0]) if stages.by_stage else self._counted()
        return cut

    def offer(self, cut: Ints) -> None:
        """Climb from a cut, and keep what is found if it is the best within the budget."""
        cut = climb(self.stages, cut, self.budget_bytes)
        scores = self.stages.score(cut[None])
        if scores.rank_bytes.max() <= self.budget_bytes and scores.step_s[0] < self.best_s:
            self.best, self.best_s = cut, float(scores.step_s[0])

    def tighten(self) -> None:
        """Raise the bound round by round, and climb from some of the paths that it gives."""
        self._forget_long()
        stages, halved, stale = self.stages, 1.0, 0
        for number in range(_ROUNDS):
            if self.bound_s >= self.best_s * (1 - _CLOSE):
                return
            relaxed_s, cut = shortest(self._costs())
            if relaxed_s == np.inf:  # every cut is longer than the best, or above the budget
                self.bound_s = self.best_s
                return
            bound_s = relaxed_s - float(self._price.sum()) * self.budget_bytes
            bound_s += float(self._price.sum(axis=1) @ stages.less_bytes)
            stale = 0 if bound_s > self.bound_s else stale + 1
            self.bound_s = max(self.bound_s, bound_s)
            if stale > _PATIENCE:
                halved, stale = halved / 2, 0
            if number % (_ROUNDS // _CLIMBS) == 1:
                self.offer(cut)
            self._follow(cut, halved * max(0.0, min(self.best_s, 1.1 * abs(self.bound_s)) - bound_s))

    def _counted(self) -> float:
        """Return a bound from whole units: some rank has its share of them, one has the longest and a unit a stage."""
        stages = self.stages
        least_fill_s = shortest([stages.fill[kind] for kind in stages.kind_of])[0]
        work = np.sort(stages.unit_work)
        beside = stages.stages // stages.ranks - 1
        share = -(-stages.units // stages.ranks)
        return least_fill_s + max(float(work[:share].sum()), float(work[-1] + work[:beside].sum()))

    def _forget_long(self) -> None:
        """Leave out lengths of runs whose key alone makes a cut longer than the best."""
        least_fill_s = shortest([self.stages.fill[kind] for kind in self.stages.kind_of])[0]
        short = (self.stages.key <= self.best_s - least_fill_s).any(axis=(0, 2))
        self._lengths = slice(0, 1 + int(np.flatnonzero(short).max(initial=1)))

    def _costs(self) -> list[Floats]:
        """Return what each stage adds to the relaxed step; runs that no better cut has are infinite."""
        stages, short = self.stages, self._lengths
        made: dict[tuple[int, int], Floats] = {}
        costs = []
        for stage, kind in enumerate(stages.kind_of):
            group, (rank, slot) = int(stages.group_of[stage]), stages.slots[stage]
            if (kind, group) not in made:
                made[kind, group] = stages.fill[kind, short] + self._weight[group] * self._key[kind, short]
            cost = made[kind, group]
            if self._price[rank].any():
                pull = self._price[rank] @ stages.held[rank][:, slot]
                saved = np.tensordot(pull, self._saved[kind][:, short], axes=1)
                cost = cost + self._price[rank].sum() * stages.static[short] + saved
            costs.append(np.where(self._banned[stage][short], np.inf, cost))
        return costs

    def _follow(self, cut: Ints, missing_s: float) -> None:
        """Move the prices along the subgradient at a cut, by Polyak's step towards a bound higher by `missing_s`."""
        stages = self.stages
        length, stop = np.diff(cut), cut[1:]
        key = np.bincount(stages.group_of, stages.key[stages.kind_of, length, stop], self._groups)
        slope = key - key.mean()
        if slope.any():
            weight = np.maximum(0.0, self._weight + missing_s / np.square(slope).sum() * slope)
            self._weight = weight / weight.sum()
        over = self._held_bytes(length, stop) / self.budget_bytes - 1
        most = (np.arange(stages.ranks), over.argmax(axis=1))
        step = missing_s / max(float(np.square(over[most]).sum()), 1e-300) / self.budget_bytes
        self._price[most] = np.maximum(0.0, self._price[most] + step * over[most])

    def _held_bytes(self, length: Ints, stop: Ints) -> Floats:
        """Return [rank, moment]: the bytes held then, without temporaries."""
        stages = self.stages
        saved = np.array([self._saved[kind][:, k, j] for kind, k, j in zip(stages.kind_of, length, stop, strict=True)])
        held: Floats = np.einsum("rmsa,rsa->rm", stages.held, saved[stages.stages_of])
        static: Floats = stages.static[length, stop][stages.stages_of].sum(axis=1)
        return held + (static + stages.less_bytes)[:, None]
