"""Cuts that the simulator finds shorter than those of the closed form: all cuts where they are few, else by climbing.

A closed form takes stages of a rank to make up for one another, and bubbles to be those of even stages. Where neither
holds, its best cut may be a tenth longer than the best there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

from autopar.api.block_costs import Ends, exposed_s
from autopar.ir.schedule import Kind, PipelineSchedule
from autopar.ir.table import Floats, Ints
from autopar.search.interleaved import all_cuts
from autopar.search.neighbours import moved
from autopar.search.stages import Assigned, Stages
from autopar.simulate.together import Together

_WORK = 30_000_000
"""Computations that are simulated at most, of all cuts together: about 0.3 s."""

_FEW = 10_000
"""Cuts at most of which all are simulated."""

_AT_ONCE = 1024
"""Cuts whose arrays stay in a core's cache."""

_WORTH = 0.999
"""How much less a cut has to take than the one that is climbed from: closed forms give more even stages."""

_PARTS = ("forward_s", "input_gradient_s", "weight_gradient_s")


class Climbing:
    """The blocks of a program on ranks that run them by a schedule, each with a core of its own."""

    def __init__(
        self, assigned: Assigned, schedule: PipelineSchedule, budget_bytes: float, once: Sequence[Ends[list[float]]]
    ):
        """`budget_bytes` is of the devices that hold most; `once` by kind of device: what a block takes once a step."""
        self.stages = Stages(assigned, schedule, blocking=False)
        self._together = Together(schedule)
        self._budget_bytes = budget_bytes
        self._ends = np.array([*self.stages.firsts, len(assigned.units[0])])
        rank_of = self.stages.rank_of
        self._device = np.array(assigned.device_of)[rank_of]
        self._of_rank = (rank_of[:, None] == np.arange(schedule.ranks)).astype(np.float64)
        own = [
            [[getattr(unit, part) for unit in units] for part in _PARTS] + list(found)
            for units, found in zip(assigned.units, once, strict=True)
        ]
        self._sums = np.pad(np.cumsum(np.array(own, dtype=np.float64), axis=2), ((0, 0), (0, 0), (1, 0)))
        """[device, part, unit]: of all blocks before it; after `_PARTS` those of `Ends`."""

        remote = np.append(0, rank_of[1:] != rank_of[:-1])
        none = (0.0, 0.0, 0.0)
        links = [[none, *((b.forward_s, b.backward_s, b.host_s) for b in found), none] for found in assigned.boundaries]
        # [stage, first unit, 3]: what comes in from the stage before, nothing where that is on the same rank.
        self._comes = np.array(links)[np.array(assigned.link_of)] * remote[:, None, None]

    def step_s(self, cuts: Ints) -> Floats:
        """Return the step of each cut, a row of `cuts`: with what ranks do once, and memory no limit."""
        return np.concatenate([self._step_s(cuts[at : at + _AT_ONCE]) for at in range(0, len(cuts), _AT_ONCE)])

    def _step_s(self, cuts: Ints) -> Floats:
        at, parts = self._ends[cuts].T, np.arange(self._sums.shape[1])[:, None, None]
        device = self._device[:, None]
        own = self._sums[device, parts, at[1:]] - self._sums[device, parts, at[:-1]]  # [part, stage, cut]
        forward, inputs, weights = own[:3]
        comes = np.stack([each[first] for each, first in zip(self._comes, at[:-1], strict=True)])  # [stage, cut, 3]
        last = np.zeros_like(comes[:1])
        goes = np.append(comes[1:], last, axis=0)
        handled = comes[..., 2] + goes[..., 2]
        seconds: dict[Kind, Floats] = {"F": forward + handled, "I": inputs + handled, "W": weights}
        seconds["B"] = seconds["I"] + weights
        ends_s = self._together.ends_s(seconds, goes[..., 0], comes[..., 1])
        by_rank = np.einsum("psc,sr->prc", own, self._of_rank)
        once = Ends(*by_rank[3:])
        step_s: Floats = (ends_s + exposed_s(once, by_rank[0], by_rank[1] + by_rank[2]) + once.step_s).max(axis=0)
        return step_s

    def best(self, start: Sequence[int]) -> tuple[int, ...] | None:
        """Return the first units of the shortest cut found, `None` if none is worth taking in place of `start`."""
        cut = np.append(np.searchsorted(self.stages.firsts, start), self.stages.units)
        start_s = float(self.step_s(cut[None])[0])
        count = comb(self.stages.units - 1, self.stages.stages - 1)
        if count <= _FEW and count * self._together.actions <= _WORK:
            found, found_s = self._shortest(all_cuts(self.stages))
        else:
            found, found_s = self._climbed(cut, start_s)
        return None if found is None or found_s > _WORTH * start_s else self.stages.first_units(found)

    def _climbed(self, cut: Ints, best_s: float) -> tuple[Ints | None, float]:
        """Return the cut from which no block that moves to another stage makes a shorter one, and its step."""
        left, every = _WORK, np.ones(self.stages.stages, dtype=bool)
        best: Ints | None = None
        while left > 0:
            around = moved(cut, every)
            left -= len(around) * self._together.actions
            found, found_s = self._shortest(around)
            if found is None or found_s >= best_s:
                break
            best, best_s, cut = found, found_s, found
        return best, best_s

    def _shortest(self, cuts: Ints) -> tuple[Ints | None, float]:
        """Return the shortest of some cuts within the budget, of equals the most even, and its step."""
        if not len(cuts):
            return None, np.inf
        scores = self.stages.score(cuts)
        fits = scores.rank_bytes.max(axis=1) <= self._budget_bytes
        if not fits.any():
            return None, np.inf
        cuts, imbalance = cuts[fits], scores.imbalance[fits]
        step_s = self.step_s(cuts)
        best = int(np.lexsort((imbalance, step_s))[0])
        return cuts[best], float(step_s[best])
