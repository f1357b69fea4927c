"""How a search stands: the plans found so far, what bounds and estimates say of all else, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from autopar.api.estimating import Estimates
from autopar.api.kinds import shape_of
from autopar.api.pipelining import Wanted
from autopar.api.proofs import Best, Proofs
from autopar.api.schedules import other_schedules, ways_to_run
from autopar.api.solved import WHY_NOT, Solved
from autopar.api.solving import Solving, Waiting
from autopar.api.turns import off_by, turn_s
from autopar.api.wishes import Wishes
from autopar.api.works import Works
from autopar.figures import format_bytes, format_seconds
from autopar.search.ilp import Solution
from autopar.search.meshes import Candidate, freer
from autopar.search.trials import Trial

_UNLIKELY = 1.25
"""Estimate over the best plan's seconds from which a trial is not relaxed: estimates err on the fast side."""

_SLOWER = 1.1
"""The same, of estimates corrected by how far those of trials of the same kind were off."""

_TO_PROVE = 0.2
"""Share of the time limit that is kept for saying how much better a plan could be."""

_TO_LIGHTEN = 0.15
"""The same for recomputing less, where a plan that recomputes everything may become the best by that."""


@dataclass
class Standing:
    """What one search knows of its trials by now."""

    solving: Solving
    wishes: Wishes
    started: float = field(default_factory=time.process_time)
    mixes: bool = False
    """Whether blocks may be recomputed each in its way."""

    solved: list[Solved] = field(init=False, default_factory=list)
    """Trials that were found out about: solved, ruled out or left out."""

    free_s: dict[tuple[object, ...], float] = field(init=False, default_factory=dict)
    """Bounds of trials if memory were no limit, by their kin: see `kin` and `learn`."""

    _whole_s: dict[Candidate, dict[int, float]] = field(init=False, default_factory=dict)
    """Those of the whole program with nothing recomputed, by mesh and number of micro-batches."""

    likely: dict[Trial, float] = field(init=False, default_factory=dict)
    """Estimated seconds of trials that are not the whole program."""

    left: set[Trial] = field(init=False, default_factory=set)
    """Trials that were left out for their estimates alone."""

    is_short: bool = field(init=False, default=False)
    """Whether estimates alone took so much of the time that few trials can be looked at."""

    estimates: Estimates = field(init=False)
    _proofs: Proofs = field(init=False)
    _fluid: dict[Trial, Best] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Prepare bounds."""
        works = Works(self.solving, self.wishes)
        self._proofs = Proofs(works, self.mixes)
        self.estimates = Estimates(works, self.mixes, lambda: self.left_s)

    @property
    def best(self) -> Solved | None:
        """Return the fastest plan so far."""
        found = [one for one in self.solved if one.outcome is not None]
        return min(found, key=lambda each: each.step_s) if found else None

    @property
    def best_s(self) -> float:
        """Return its predicted seconds, infinite without one."""
        best = self.best
        return inf if best is None else best.step_s

    @property
    def hoped_best_s(self) -> float:
        """Return what the best plan takes once what recomputes everything recomputes less, as far as is estimated."""
        return min((one.step_s / self.slack(one.trial) for one in self.solved if one.outcome is not None), default=inf)

    @property
    def left_s(self) -> float:
        """Return what is left of the time limit for finding plans."""
        return self.left_to_prove_s - _TO_PROVE * self.solving.options.time_limit

    @property
    def left_to_try_s(self) -> float:
        """Return what is left of that for further trials."""
        full = (one for one in self.solved if one.trial.recompute == "full" and one.outcome is not None)
        heavy = self.mixes and any(one.step_s < self.best_s * self.slack(one.trial) for one in full)
        return self.left_s - heavy * _TO_LIGHTEN * self.solving.options.time_limit

    @property
    def left_to_prove_s(self) -> float:
        """Return what is left of all of it."""
        return self.solving.options.time_limit - (time.process_time() - self.started)

    @property
    def is_late(self) -> bool:
        """Return whether time ended trials, and there is no plan."""
        return self.best is None and any(one.solution.status == "time_limit" for one in self.solved)

    def too_large(self, trial: Trial) -> str | None:
        """Return why a trial cannot fit, by what its average rank holds; `None` if it may."""
        rough, budget = self.solving.rough(trial.recompute, self.wishes), self.solving.mean_budget(trial.depth)
        held = rough.mean_bytes(shape_of(trial))
        if held <= budget:
            return None
        return (
            f"does not fit in memory however it is split: an average rank holds at least {format_bytes(ceil(held))} "
            f"and may hold {format_bytes(budget)}, recompute {trial.recompute}"
        )

    def turn_s(self, one: Trial | Waiting) -> float:
        """Return the larger of its bound and its estimate: only this counts what recomputing less is hoped to save.

        What time was too short to relax comes last.
        """
        if isinstance(one, Waiting) and not one.ended:
            return inf
        trial, bound_s = (one.trial, one.bound_s) if isinstance(one, Waiting) else (one, 0.0)
        return max(bound_s, turn_s(trial, self.likely.get(trial, 0.0), self.estimates_off, short=self.is_short))

    @property
    def estimates_off(self) -> dict[Trial, float]:
        """Return how many times as long as estimated the plans took that were found."""
        known = [each for each in self.solved if each.trial in self.likely and each.outcome is not None]
        return {each.trial: each.step_s / self.slack(each.trial) / self.likely[each.trial] for each in known}

    def off(self, trial: Trial) -> float:
        """Return how many times as long as its bound a pipeline takes at least, by what others of its kind do."""
        if trial.depth == 1:
            return 1.0
        known = {one.trial: one.step_s / one.solution.bound_s for one in self.solved if one.outcome is not None}
        return off_by(trial, known) or 1.0

    def slack(self, trial: Trial) -> float:
        """Return how many times as long as the best plan a trial may take: what recomputing less is to save."""
        return self.estimates.slack(trial)

    def is_hopeless(self, trial: Trial, *, doubting: bool = True) -> bool:
        """Return whether a trial, by what is known before it is relaxed, is not better than the best plan.

        `doubting`: or by its estimate.
        """
        return self.is_beaten(trial) or (doubting and self.is_unlikely(trial)) or self.needs_less(trial)

    def doubted(self) -> list[Trial]:
        """Return the trials that only estimates were against, the likeliest first."""
        found = [
            one.trial
            for one in self.solved
            if one.trial in self.left
            and not self.is_hopeless(one.trial, doubting=False)
            and not self.is_outdone(one.trial, one.solution.bound_s, doubting=False)
            and not self.is_good(self.fluid_of(one.trial).step_s)
        ]
        return sorted(found, key=self.turn_s)

    def reopen(self, trials: Sequence[Trial]) -> None:
        """Forget that trials were left out."""
        self.solved = [one for one in self.solved if one.trial not in trials]
        self.left.difference_update(trials)

    def is_unlikely(self, trial: Trial) -> bool:
        """Return whether a trial's estimate is too slow, corrected by how far off estimates were if that is known."""
        off = off_by(trial, self.estimates_off)
        if off is None:
            return self.likely[trial] > _UNLIKELY * self.best_s
        return off * self.likely[trial] > _SLOWER * self.best_s

    def is_outdone(self, trial: Trial, bound_s: float, *, doubting: bool = True) -> bool:
        """Return whether a trial with such a bound is not worth solving: others of its kind were slower than theirs.

        Only recomputing less could make it the best. That has to make up for what others were slower by, if that is
        `doubting` it, and for what these may save themselves.
        """
        hoped_s = bound_s * (self.off(trial) if doubting else 1.0) / self.slack(trial)
        return bound_s >= self.best_s and hoped_s >= self.hoped_best_s

    def needs_less(self, trial: Trial) -> bool:
        """Return whether a trial that recomputes everything has a plan that recomputes nothing, which is faster."""
        plain = replace(trial, recompute="none")
        return trial != plain and any(one.trial == plain and one.outcome is not None for one in self.solved)

    def is_good(self, bound_s: float) -> bool:
        """Return whether the best plan is as near to a bound as is asked."""
        return bound_s >= self.best_s * (1.0 - self.solving.options.gap)

    def fluid_of(self, trial: Trial) -> Best:
        """Return what a trial's blocks can be at best, as a fluid; blocks recomputed each in its way as any may be."""
        trial = self._all_ways(trial)
        if trial not in self._fluid:
            self._fluid[trial] = self._best_fluid(trial, None)
        return self._fluid[trial]

    def fluid_by(self, trial: Trial, wanted: Wanted) -> float:
        """Return the seconds that a trial's blocks take at least as a fluid that is run by one schedule."""
        return self._proofs.best(trial, [wanted], self.estimates.microbatch_s(trial)).step_s

    def tighten(self, trial: Trial) -> None:
        """Bound a trial's fluid by what waits for what in its schedules, too, as far as it takes to be good."""
        trial = self._all_ways(trial)
        enough_s = self.best_s * (1.0 - self.solving.options.gap)
        self._fluid[trial] = self._best_fluid(trial, enough_s)

    def _best_fluid(self, trial: Trial, enough_s: float | None) -> Best:
        blocks = self.solving.rough(trial.recompute, self.wishes).blocks
        ways = ways_to_run(trial, self.wishes, blocks)
        return self._proofs.best(trial, ways, self.estimates.microbatch_s(trial), enough_s)

    def work_s(self, trial: Trial) -> float:
        """Return what a trial's work takes at least; found in no time for what has ranks of the same kind."""
        return self._proofs.work_s(trial)

    def knows_fluid_of(self, trial: Trial) -> bool:
        """Return whether that is known by now."""
        return self._all_ways(trial) in self._fluid

    def _all_ways(self, trial: Trial) -> Trial:
        mixed = self.mixes and not isinstance(trial.recompute, str)
        return replace(trial, recompute="full") if mixed else trial

    def is_open(self, one: Solved) -> bool:
        """Return whether a trial may become another that recomputes less."""
        return self.mixes and one.trial.recompute != "none" and one.solution.status != "infeasible"

    def lightest_s(self, trial: Trial) -> float:
        """Return a bound of a trial's mesh whatever is recomputed."""
        return self.known_bound_s(replace(trial, recompute="none"))

    def other_schedules(self, trial: Trial) -> list[Wanted]:
        """Return the schedules of a pipeline beside the simplest."""
        return other_schedules(trial, self.wishes, self.solving.rough(trial.recompute, self.wishes).blocks)

    def is_beaten(self, trial: Trial) -> bool:
        """Return whether no plan of a trial is known to be faster than the best, less being recomputed where it may."""
        return self.is_good(self._hoped_s(trial))

    def _hoped_s(self, trial: Trial) -> float:
        """Return a bound of what a trial may become: a proven one, or that of recomputing all less what that wastes."""
        return max(self.lightest_s(trial), self.known_bound_s(trial) / self.slack(trial))

    def known_bound_s(self, trial: Trial) -> float:
        """Return a bound from what was relaxed before."""
        found = [self.free_s.get(kin(replace(trial, recompute="none")), 0.0), self.estimates.bound_s(trial)]
        # Stages on their mesh, one after another, are the whole program on it; more micro-batches add work to it, and
        # each hides less of what runs once a step.
        known = ((count, s) for ranks in freer(trial.ranks) for count, s in self._whole_s.get(ranks, {}).items())
        whole_s = max((each_s for count, each_s in known if count <= trial.microbatches), default=0.0)
        return max(*found, whole_s / self.solving.at_once(trial))

    def learn(self, trial: Trial, free_s: float) -> None:
        """Note that no plan of a trial is faster than that, were memory no limit."""
        self.free_s[kin(trial)] = max(free_s, self.free_s.get(kin(trial), 0.0))
        if trial.depth == 1 and trial.recompute == "none":
            self._whole_s.setdefault(trial.ranks, {})[trial.microbatches] = self.free_s[kin(trial)]

    def relax(self, trial: Trial, share: float = 1.0) -> Waiting | None:
        """Return a trial with the bound of its relaxation; `None` if it is impossible, which is noted.

        `share`: what it may take of the time left at most.
        """
        found = self.solving.bound(trial, self.wishes, share * self.left_to_try_s)
        if found.free_s:
            self.learn(trial, found.free_s)
        if isinstance(found, Solved):
            self.solved.append(found)
            return None
        return found

    def give_up(self, trials: Iterable[Trial]) -> None:
        """Leave trials out, each with its bound and why."""
        for trial in trials:
            bound, hoped_s = self.known_bound_s(trial), self._hoped_s(trial)
            sure = self.solving.proves(trial) and self.is_good(self.lightest_s(trial))
            why = f"{'at least' if sure else 'about'} {format_seconds(hoped_s)}"
            if not self.is_beaten(trial):
                self.left.add(trial)
                why = "not tried: others looked better"
            if bound == inf:
                why = self.estimates.no_price.get(shape_of(trial).width, WHY_NOT["infeasible"])
            late = bound < inf and self.best is None and self.left_s <= 0
            solution = Solution("time_limit" if late else "cutoff", (), inf, bound)
            self.solved.append(Solved(trial, solution, why_not=WHY_NOT["time_limit"] if late else why))


def kin(trial: Trial) -> tuple[object, ...]:
    """Return what bounds without memory limit are known by."""
    return trial.mesh, trial.depth, trial.recompute


def without(trial: Trial) -> tuple[object, ...]:
    """Return the kin of a trial with nothing recomputed."""
    return kin(replace(trial, recompute="none"))
