"""The outer search: which trials are worth their relaxation, which of those are solved, and what the rest can be.

First the program whole, on every mesh: relaxed, then solved in the order of their bounds. Then all else - stages,
micro-batches, recomputation - in the order of rough estimates. What cannot beat the best plan is proven by bounds: a
relaxation without memory limit bounds everything on the same mesh that only adds work (recomputation, smaller
micro-batches). Numbers of relaxations and solutions are limited, not only time, so that a plan does not depend on how
fast the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from autopar.api.estimating import Estimates
from autopar.api.kinds import kind_of, shape_of, varied
from autopar.api.lightening import lighter
from autopar.api.pipelining import Pipelined, Wanted
from autopar.api.proofs import Best, Proofs
from autopar.api.solving import WHY_NOT, Solved, Solving, Waiting, interrupted, left_out, ruled_out
from autopar.api.turns import AT_MOST, LATE, Turn, alternating, next_turn, turn_s
from autopar.api.wishes import Wishes
from autopar.figures import format_bytes
from autopar.progress import Progress
from autopar.search.ilp import Solution
from autopar.search.meshes import freer
from autopar.search.trials import Recompute, Trial, near_sizes

_RELAXED, _SOLVED, _CHUNK = 24, 10, 6
"""Relaxations and solutions at most of trials that are not the whole program, and how many are relaxed at a time."""

_UNLIKELY = 1.25
"""Estimate over the best plan's seconds from which a trial is not relaxed: estimates err on the fast side."""

_SLOWER = 1.1
"""The same, of estimates corrected by how far those of trials of the same kind were off."""

_CLIMBED = 4
"""Trials at most with micro-batches of about the size of the best plan's."""

_REFINED, _LIGHTENED = 2, 3
"""Pipelines whose other schedules are tried, and plans that recompute all in which less is."""

_PROVEN = 8
"""Trials that are relaxed only to say how much better a plan could be that recomputes less."""

_TO_PROVE = 0.2
"""Share of the time limit that is kept for saying how much better a plan could be."""

_TO_LIGHTEN = 0.15
"""The same for recomputing less, where a plan that recomputes everything may become the best by that."""

_BOUNDED = 400
"""Trials at most whose blocks are bounded as a fluid."""


@dataclass
class Outer:
    """One run of the outer search."""

    solving: Solving
    wishes: Wishes
    progress: Progress
    started: float = field(default_factory=time.process_time)
    mixes: bool = False
    """Whether blocks may be recomputed each in its way."""

    interrupted: bool = field(init=False, default=False)
    solved: list[Solved] = field(init=False, default_factory=list)
    _free_s: dict[tuple[object, ...], float] = field(init=False, default_factory=dict)
    _proofs: Proofs = field(init=False)
    _estimates: Estimates = field(init=False)
    _fluid: dict[Trial, Best] = field(init=False, default_factory=dict)
    _likely: dict[Trial, float] = field(init=False, default_factory=dict)
    """Estimated seconds of trials that are not the whole program."""

    _left: set[Trial] = field(init=False, default_factory=set)
    """Trials that were left out for their estimates alone."""

    def __post_init__(self) -> None:
        """Prepare bounds."""
        self._proofs = Proofs(self.solving, self.wishes, self.mixes)
        self._estimates = Estimates(self.solving, self.wishes, self.mixes, lambda: self.left_s)

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
    def left_s(self) -> float:
        """Return what is left of the time limit for finding plans."""
        return self.left_to_prove_s - _TO_PROVE * self.solving.options.time_limit

    @property
    def left_to_try_s(self) -> float:
        """Return what is left of that for further trials."""
        full = (one for one in self.solved if one.trial.recompute == "full" and one.outcome is not None)
        heavy = self.mixes and any(one.step_s < self.best_s * self._slack(one.trial) for one in full)
        return self.left_s - heavy * _TO_LIGHTEN * self.solving.options.time_limit

    @property
    def left_to_prove_s(self) -> float:
        """Return what is left of all of it."""
        return self.solving.options.time_limit - (time.process_time() - self.started)

    def run(self, whole: Sequence[Trial], others: Sequence[Trial]) -> None:
        """Fill `solved`: the whole program's trials first."""
        try:
            self._best_first(whole, f"bound {len(whole)} meshes", len(whole))
            if others:
                self._run_others(others)
            if self.mixes:
                self._lighten()
            if others:
                self._prove_again()
            self._raise_bounds()
        except KeyboardInterrupt:
            self.interrupted = True
            known = {one.trial for one in self.solved}
            left = [trial for trial in (*whole, *others) if trial not in known]
            self.solved += [interrupted(trial, self._known_bound_s(trial)) for trial in left]

    def _run_others(self, others: Sequence[Trial]) -> None:
        left = []
        for trial in others:
            if (uneven := self.solving.uneven(trial)) is not None:
                self.solved.append(Solved(trial, Solution("infeasible", (), inf, inf), why_not=uneven))
            elif self._is_beaten(trial):
                self._give_up([trial])
            elif (why := self._too_large(trial)) is None:
                left.append(trial)
            else:
                self.solved.append(Solved(trial, Solution("infeasible", (), inf, inf), why_not=why))
        self.progress.phase(f"estimate {len(left)} trials")
        self._likely = self._estimates.of(left, fits=self.best is not None)
        queue = alternating(varied(sorted(left, key=self._turn_s)))
        relaxed = solutions = 0
        while queue and relaxed < _RELAXED and solutions < _SOLVED and self.left_to_try_s > 0:
            chunk: list[Trial] = []
            while queue and len(chunk) < _CHUNK:
                trial = queue.pop(0)
                if self._is_hopeless(trial):
                    self._give_up([trial])
                elif self._is_good(bound_s := self._fluid_of(trial).step_s):
                    self.solved.append(ruled_out(trial, bound_s))
                else:
                    chunk.append(trial)
            done = self._best_first(
                chunk, f"bound stages and micro-batches, {relaxed} of {len(left)}", _SOLVED - solutions
            )
            relaxed, solutions = relaxed + done[0], solutions + done[1]
        self._give_up(queue)
        self._climb()
        self._refine()

    def first_that_fits(self) -> Solved | None:
        """Return a plan of one of the likeliest trials that time was too short for, however long that takes."""
        stopped = [one.trial for one in self.solved if one.solution.status == "time_limit"]
        likely = sorted(stopped, key=lambda each: self._likely.get(each, inf))
        for trial in varied(likely)[:_SOLVED]:
            self.progress.phase("time is over without a plan: the likeliest that fits")
            found = self.solving.bound(trial, self.wishes, inf)
            if isinstance(found, Waiting):
                found = self.solving.solve(found, self.wishes, self._ways(trial), inf, inf)
            self.solved = [*(one for one in self.solved if one.trial != trial), found]
            if found.outcome is not None:
                return found
        return None

    def _too_large(self, trial: Trial) -> str | None:
        """Return why a trial cannot fit, by what its average rank holds; `None` if it may."""
        rough, budget = self.solving.rough(trial.recompute, self.wishes), self.solving.mean_budget(trial.depth)
        held = rough.mean_bytes(shape_of(trial))
        if held <= budget:
            return None
        return (
            f"does not fit in memory however it is split: an average rank holds at least {format_bytes(ceil(held))} "
            f"and may hold {format_bytes(budget)}, recompute {trial.recompute}"
        )

    def _best_first(self, trials: Sequence[Trial], phase: str, most: int) -> tuple[int, int]:
        """Relax and solve trials, what promises most first; return how many of each.

        A trial's turn to be relaxed comes by its estimate, that to be solved by its bound, if that is larger. So a good
        plan that is found early spares the others both; and plans show by how much estimates of their kind are off.
        """
        heap: list[Turn] = [(0.0, place, trial) for place, trial in enumerate(trials)]
        relaxed = solutions = 0
        try:
            while heap:
                heap = [(self._turn_s(one), place, one) for _, place, one in heap]
                turn = next_turn(
                    heap, late=self.best is None and self.left_to_try_s < LATE * self.solving.options.time_limit
                )
                _, place, one = turn
                if isinstance(one, Waiting):
                    solutions += self._solve(one, most - solutions, len(heap), len(trials))
                elif one in self._likely and (self.left_to_try_s <= 0 or self._is_hopeless(one)):
                    self._give_up([one])
                else:
                    self.progress.phase(phase)
                    found = self._relax(one)
                    relaxed += 1
                    self.progress.update(done=relaxed, total=len(trials))
                    if found is not None:
                        heap.append((found.bound_s, place, found))
                heap.remove(turn)
        except KeyboardInterrupt:
            known = {one.trial for one in self.solved}
            waiting = (one for _, _, one in heap if isinstance(one, Waiting) and one.trial not in known)
            self.solved += [interrupted(each.trial, each.bound_s) for each in waiting]
            raise
        return relaxed, solutions

    def _relax(self, trial: Trial) -> Waiting | None:
        found = self.solving.bound(trial, self.wishes, self.left_to_try_s)
        if found.free_s:
            self._free_s[_kin(trial)] = max(found.free_s, self._free_s.get(_kin(trial), 0.0))
        if isinstance(found, Solved):
            self.solved.append(found)
            return None
        return found

    def _turn_s(self, one: Trial | Waiting) -> float:
        """Return the larger of its bound and its estimate: only this counts what recomputing less is hoped to save."""
        trial, bound_s = (one.trial, one.bound_s) if isinstance(one, Waiting) else (one, 0.0)
        return max(bound_s, turn_s(trial, self._likely.get(trial, 0.0), self._estimates_off))

    @property
    def _estimates_off(self) -> dict[Trial, float]:
        """Return how many times as long as estimated the plans took that were found."""
        known = [each for each in self.solved if each.trial in self._likely and each.outcome is not None]
        return {each.trial: each.step_s / self._slack(each.trial) / self._likely[each.trial] for each in known}

    def _solve(self, one: Waiting, most: int, left: int, total: int) -> bool:
        """Solve one of the trials left unless it is no better than the best plan; return whether it was solved."""
        if most <= 0:
            self.solved.append(left_out(one.trial, one.bound_s, "not solved: others looked better"))
            return False
        beaten_s = self.best_s * self._slack(one.trial)
        # Only recomputing less could make it the best: that has to make up for what others were slower by.
        if one.bound_s >= self.best_s and one.bound_s * self._off(one.trial) >= beaten_s:
            self.solved.append(left_out(one.trial, one.bound_s, "not solved: others of its kind were slower"))
            return False
        self.progress.phase(f"solve {left} of {len(self.solved) + left}, best bound first")
        room_s = self.left_to_try_s * (1.0 if self.best is None or left == 1 else AT_MOST)
        found = self.solving.solve(one, self.wishes, self._ways(one.trial), beaten_s, room_s)
        self.solved.append(found)
        if found.solution.status == "interrupted":
            raise KeyboardInterrupt
        best = self.best_s
        gap = max(0.0, 1.0 - one.bound_s / best) if best < inf else None
        self.progress.update(best_s=best if best < inf else None, gap=gap, done=total - left + 1, total=total)
        return found.solution.status != "cutoff" or found.outcome is not None

    def _off(self, trial: Trial) -> float:
        """Return how many times as long as their bounds the plans of pipelines of a trial's kind take at least."""
        alike = [
            one.step_s / one.solution.bound_s
            for one in self.solved
            if one.outcome is not None and one.trial.depth > 1 and kind_of(one.trial) == kind_of(trial)
        ]
        return min(alike, default=1.0) if trial.depth > 1 else 1.0

    def _slack(self, trial: Trial) -> float:
        """Return how many times as long as the best plan a trial may take: what recomputing less is to save."""
        return self._estimates.slack(trial)

    def _is_hopeless(self, trial: Trial) -> bool:
        """Return whether a trial, by what is known before it is relaxed, is not better than the best plan."""
        return self._is_beaten(trial) or self._is_unlikely(trial) or self._needs_less(trial)

    def _is_unlikely(self, trial: Trial) -> bool:
        """Return whether a trial's estimate is too slow, as far as estimates of its kind were off."""
        off = [times for each, times in self._estimates_off.items() if kind_of(each) == kind_of(trial)]
        if self._likely[trial] > _UNLIKELY * self.best_s:
            return True
        return bool(off) and min(off) * self._likely[trial] > _SLOWER * self.best_s

    def _needs_less(self, trial: Trial) -> bool:
        """Return whether a trial that recomputes everything has a plan that recomputes nothing, which is faster."""
        plain = replace(trial, recompute="none")
        return trial != plain and any(one.trial == plain and one.outcome is not None for one in self.solved)

    def _ways(self, trial: Trial) -> list[Wanted]:
        """Return the schedules that a trial is cut for at first."""
        if trial.depth == 1:
            return []
        simplest = self.wishes.wanted(trial.depth)
        return list(dict.fromkeys([self._fluid_of(trial).wanted or simplest, simplest]))

    def _climb(self) -> None:
        """Try micro-batches of about the size of the most promising plan's: sizes that are far apart came first.

        A size that just fits is often between one that does not and one that wastes time on small operators.
        """
        left = _CLIMBED
        while left > 0 and self.left_to_try_s > 0 and self.wishes.microbatch is None:
            found = [one for one in self.solved if one.outcome is not None and isinstance(one.trial.recompute, str)]
            best = min(found, key=lambda each: each.step_s / self._slack(each.trial), default=None)
            near = [] if best is None else self._near(best.trial)
            if not near:
                return
            likely = self._estimates.more(near, fits=self.best is not None)
            # What fits with nothing recomputed rules out its like; that it looks slow rules out nothing here.
            near = sorted(near, key=lambda each: (each.recompute != "none", likely[each]))[:left]
            left -= len(near)
            for trial in near:
                if self.left_to_try_s > 0 and not self._needs_less(trial):
                    self.solved = [one for one in self.solved if one.trial != trial]
                    self._left.discard(trial)
                    self._likely.pop(trial, None)
                    self._best_first([trial], "try other micro-batches", 1)

    def _near(self, trial: Trial) -> list[Trial]:
        """Return trials next to one that were not tried and may be better."""
        ways: list[Recompute] = ["none", "full"] if self.mixes else [trial.recompute]
        known = {one.trial for one in self.solved if one.trial not in self._left}
        near = [
            replace(each, recompute=way) for way in ways for each in near_sizes(trial, self.solving.program.batch_size)
        ]
        return [
            each
            for each in near
            if each not in known
            and self._too_large(each) is None
            and not self._is_beaten(each)
            and not self._is_good(self._fluid_of(each).step_s)
        ]

    def _refine(self) -> None:
        """Try the other schedules on the best pipelines, where the schedule is open."""
        if not self.wishes.schedule_is_open:
            return
        piped = sorted((one for one in self.solved if one.pipeline is not None), key=lambda each: each.step_s)
        for one in piped[:_REFINED]:
            if one.pipeline is None or one.outcome is None:
                continue
            bubble = one.pipeline.bubble_s / one.step_s
            if bubble <= self.solving.options.gap or one.step_s * (1.0 - bubble) >= self.best_s:
                continue
            self.progress.phase("try other schedules")
            ways = self._other_schedules(one.trial)
            found = self.solving.recut(one, ways) if ways else None
            if found is not None and found.step_s < one.step_s:
                one.pipeline, one.step_s = found, found.step_s

    def _lighten(self) -> None:
        """Recompute less in the most promising plans that recompute all, and say what that leaves proven."""
        full = [one for one in self.solved if one.trial.recompute == "full" and one.outcome is not None]
        likely = sorted(full, key=lambda each: each.step_s / self._slack(each.trial))
        # What is foreseen is off by about as much on all meshes: nobody knows by how much until one was tried.
        off = 0.0
        for one in likely[:_LIGHTENED]:
            foreseen_s = max(self._lightest_s(one.trial), off * one.step_s / self._slack(one.trial))
            if foreseen_s >= self.best_s * (1.0 - self.solving.options.gap):
                continue
            self.progress.phase("recompute less")
            found = lighter(self.solving, self.wishes, one, self.left_s, self.best_s, self._reruns(one))
            if found is not None:
                self.solved.append(found)
            off = max(off, (one if found is None else found).step_s * self._slack(one.trial) / one.step_s)
        self._prove()
        for one in self.solved:
            if self._is_open(one):
                own = one.solution.bound_s if isinstance(one.trial.recompute, str) else inf
                bound = min(own, self._lightest_s(one.trial))
                one.solution = replace(one.solution, bound_s=bound)

    def _reruns(self, one: Solved) -> list[Pipelined]:
        """Return a pipeline in other schedules, each that fits."""
        if one.pipeline is None or not self.wishes.schedule_is_open:
            return []
        ways = dict.fromkeys([self.wishes.wanted(one.trial.depth), *self._other_schedules(one.trial)])
        found = (self.solving.recut(one, [each]) for each in ways if each != one.pipeline.wanted)
        return [each for each in found if each is not None]

    def _prove(self) -> None:
        """Relax, nothing recomputed and memory no limit, the trials that leave the most room below the best plan."""
        for _ in range(_PROVEN):
            left = [one.trial for one in self.solved if self._is_open(one) and _without(one.trial) not in self._free_s]
            least = min(left, key=self._lightest_s, default=None)
            # What leaves as much room and stays as it is makes more proofs idle.
            stays = [one for one in self.solved if not self._is_open(one) and one.solution.status != "infeasible"]
            room = min([self.best_s * (1.0 - self.solving.options.gap), *(one.solution.bound_s for one in stays)])
            if least is None or self._lightest_s(least) >= room or self.left_to_prove_s <= 0:
                return
            self._relax_plain(least)

    def _relax_plain(self, trial: Trial) -> None:
        """Bound a trial's mesh whatever is recomputed: nothing is, and memory is no limit."""
        free_s = self._estimates.relaxed_s(replace(trial, recompute="none"), self.left_to_prove_s)
        self._free_s[_without(trial)] = free_s / self.solving.at_once(trial)

    def _prove_again(self) -> None:
        """Bound, as a fluid, the trials that leave the most room below the best plan; relax where that says nothing."""
        self.progress.phase("prove")
        proven: set[Trial] = set()
        relaxed = 0
        for _ in range(_BOUNDED):
            left = [one for one in self.solved if one.solution.status != "infeasible"]
            least = min(left, key=lambda each: each.solution.bound_s, default=None)
            if least is None or least.trial in proven or self._is_good(least.solution.bound_s):
                return
            if self.left_to_prove_s <= 0:
                return
            proven.add(least.trial)
            bound_s = self._fluid_of(least.trial).step_s
            unknown = bound_s == 0.0 and self._is_open(least)
            if not self._is_good(bound_s) and relaxed < _PROVEN:
                whole = Trial(least.trial.ranks)
                if unknown and _without(least.trial) not in self._free_s:
                    self._relax_plain(least.trial)
                    relaxed += 1
                elif not unknown and least.trial.replicas > 1 and _kin(whole) not in self._free_s:
                    # Collectives of gradients and parameters are in no fluid.
                    self._relax_plain(whole)
                    relaxed += 1
            bound_s = self._lightest_s(least.trial) if unknown else max(bound_s, self._known_bound_s(least.trial))
            if least.outcome is None and bound_s == inf:
                found = ruled_out(least.trial, inf)
                least.solution, least.why_not = found.solution, found.why_not
            elif bound_s > least.solution.bound_s:
                least.solution = replace(least.solution, bound_s=min(bound_s, least.step_s))

    def _raise_bounds(self) -> None:
        """Give each trial the best bound known by now: what was relaxed after it was given up may bound it, too."""
        for one in self.solved:
            known_s = self._lightest_s(one.trial) if self._is_open(one) else self._known_bound_s(one.trial)
            if one.solution.status != "infeasible" and one.solution.bound_s < known_s < inf:
                one.solution = replace(one.solution, bound_s=min(known_s, one.step_s))

    def _is_good(self, bound_s: float) -> bool:
        return bound_s >= self.best_s * (1.0 - self.solving.options.gap)

    def _fluid_of(self, trial: Trial) -> Best:
        """Return what a trial's blocks can be at best, as a fluid."""
        if trial not in self._fluid:
            ways = [self.wishes.wanted(trial.depth)] if trial.depth > 1 else []
            if ways and self.wishes.schedule_is_open:
                ways += self._other_schedules(trial)
            self._fluid[trial] = self._proofs.best(trial, ways, self._estimates.microbatch_s(trial))
        return self._fluid[trial]

    def _is_open(self, one: Solved) -> bool:
        return one.trial.recompute != "none" and one.solution.status != "infeasible"

    def _lightest_s(self, trial: Trial) -> float:
        """Return a bound of a trial's mesh whatever is recomputed."""
        return self._known_bound_s(replace(trial, recompute="none"))

    def _other_schedules(self, trial: Trial) -> list[Wanted]:
        most = self.solving.rough(trial.recompute, self.wishes).blocks // trial.depth
        found = [Wanted(trial.depth, "zb_h1")]
        if "interleave" not in self.wishes.never and trial.microbatches >= trial.depth:
            times = sorted({each for each in (2, 4, min(8, most)) if 1 < each <= most})
            found += [Wanted(trial.depth, "interleaved_1f1b", each) for each in times]
            found += [Wanted(trial.depth, "zbv", 2)] if most >= 2 else []
        return found

    def _is_beaten(self, trial: Trial) -> bool:
        return self._known_bound_s(trial) >= self.best_s * (1.0 - self.solving.options.gap)

    def _known_bound_s(self, trial: Trial) -> float:
        """Return a bound from what was relaxed before."""
        found = [self._free_s.get(_kin(replace(trial, recompute="none")), 0.0), self._estimates.bound_s(trial)]
        # Stages on their mesh, one after another, are the whole program on it.
        whole_s = max(self._free_s.get(_kin(Trial(ranks)), 0.0) for ranks in freer(trial.ranks))
        return max(*found, whole_s / self.solving.at_once(trial))

    def _give_up(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            bound = self._known_bound_s(trial)
            sure = "at least" if self.solving.proves(trial) else "about"
            why = f"{sure} {bound:.4g} s" if self._is_beaten(trial) else "not tried: others looked better"
            if not self._is_beaten(trial):
                self._left.add(trial)
            if bound == inf:
                why = self._estimates.no_price.get(shape_of(trial).width, WHY_NOT["infeasible"])
            late = bound < inf and self.best is None and self.left_s <= 0
            solution = Solution("time_limit" if late else "cutoff", (), inf, bound)
            self.solved.append(Solved(trial, solution, why_not=WHY_NOT["time_limit"] if late else why))


def _kin(trial: Trial) -> tuple[object, ...]:
    return trial.mesh, trial.depth, trial.recompute


def _without(trial: Trial) -> tuple[object, ...]:
    return _kin(replace(trial, recompute="none"))
