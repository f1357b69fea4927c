"""The outer search: which trials are worth their relaxation, which of those are solved, and what the rest can be.

First the program whole, on every mesh: relaxed, then solved in the order of their bounds. Then all else - stages,
micro-batches, recomputation - in the order of rough estimates. What cannot beat the best plan is proven by bounds: a
relaxation without memory limit bounds everything on the same mesh that only adds work (recomputation, smaller
micro-batches). Numbers of relaxations and solutions are limited, not only time, so that a plan does not depend on how
fast the machine is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from autopar.api.kinds import varied
from autopar.api.lightening import lighter
from autopar.api.pairing import exposed_s, twice_as_many
from autopar.api.pipelining import Pipelined, Wanted
from autopar.api.proving import prove, raise_bounds
from autopar.api.solved import Solved, interrupted, left_out, ruled_out
from autopar.api.solving import Waiting
from autopar.api.standing import Standing
from autopar.api.turns import AT_MOST, LATE, Turn, alternating, is_staged, next_turn
from autopar.progress import Progress
from autopar.search.ilp import Solution
from autopar.search.trials import Recompute, Trial, near_sizes, other_sizes

_RELAXED, _SOLVED, _CHUNK = 24, 10, 6
"""Relaxations and solutions at most of trials that are not the whole program, and how many are relaxed at a time."""

_FIRST, _SLOW = 2, 0.2
"""How many are relaxed at a time without a plan, if what came before took more than this share of the time: any plan
comes first of a program that is slow to look at."""

_WHOLE = 0.5
"""Share of the time for trials, at most, that the whole program's have while others wait and there is a plan."""

_UNPLANNED = 0.35
"""Share of the time left for trials that one of several may take to be solved while there is no plan."""

_CLIMBED = 4
"""Trials at most with micro-batches of about the size of the best plan's."""

_ANY = 0.25
"""How much faster another plan of its trial may be than one that is wanted soon, because time is over without any."""

_REFINED, _LIGHTENED = 2, 3
"""Pipelines whose other schedules are tried, and plans that recompute all in which less is."""

_PAIRED = 2
"""Plans of which twice as many micro-batches are tried, two at once."""

_AFTER_S = 2.0
"""Seconds that proofs of what is found late may take."""


@dataclass
class Outer:
    """One run of the outer search."""

    standing: Standing
    progress: Progress
    interrupted: bool = field(init=False, default=False)
    _waiting: list[Turn] = field(init=False, default_factory=list)
    """Meshes of the whole program that wait until other trials had their time."""

    _failed: Counter[bool] = field(init=False, default_factory=Counter)
    """How many trials with stages, and without, turned out not to fit."""

    _lightened: set[Trial] = field(init=False, default_factory=set)
    """Plans that recompute all in which less was tried to be."""

    _off: dict[tuple[bool, bool], float] = field(init=False, default_factory=dict)
    """How many times as long as hoped these took, by whether there are stages, and micro-batches."""

    def run(self, whole: Sequence[Trial], others: Sequence[Trial]) -> None:
        """Fill `solved`: the whole program's trials first."""
        try:
            for_others_s = (1.0 - _WHOLE) * self.standing.left_to_try_s if others else -inf
            self._best_first(whole, f"bound {len(whole)} meshes", len(whole), kept_s=for_others_s)
            if others:
                self._run_others(others)
                self._best_first((), "go on with the whole program", len(whole), waiting=self._waiting)
            if self.standing.mixes:
                self._lighten(lambda: self.standing.left_s)
                self._bound_as_open(self.standing.solved)
            if others:
                self._pair()
            if (others or self.standing.mixes) and not self.standing.is_late:
                self.progress.phase("prove")
                self.standing.give_up(self._open(self._between(others)))
                prove(self.standing)
            if self.standing.mixes and self._lighten(lambda: self.standing.left_to_prove_s - _AFTER_S):
                self.progress.phase("prove")
                prove(self.standing)
            raise_bounds(self.standing)
        except KeyboardInterrupt:
            self.interrupted = True
            known = {one.trial for one in self.standing.solved}
            left = [each for each in (*whole, *others, *self._between(others)) if each not in known]
            self.standing.solved += [interrupted(trial, self.standing.known_bound_s(trial)) for trial in left]

    def _between(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials that nobody looked at between those: with micro-batches of all other sizes."""
        if self.standing.wishes.microbatch is not None:
            return []
        known = {each.trial for each in self.standing.solved} | set(trials)
        cut = {(each.ranks, each.depth, each.recompute): each for each in trials if each.microbatches > 1}
        batch = self.standing.solving.program.batch_size
        found = dict.fromkeys(size for each in cut.values() for size in other_sizes(each, batch))
        return [each for each in found if each not in known]

    def _open(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return those that may be; what the others are is noted."""
        left = []
        for trial in trials:
            if (uneven := self.standing.solving.uneven(trial)) is not None:
                self.standing.solved.append(Solved(trial, Solution("infeasible", (), inf, inf), why_not=uneven))
            elif self.standing.is_beaten(trial):
                self.standing.give_up([trial])
            elif (why := self.standing.too_large(trial)) is None:
                left.append(trial)
            else:
                self.standing.solved.append(Solved(trial, Solution("infeasible", (), inf, inf), why_not=why))
        return left

    def _run_others(self, others: Sequence[Trial]) -> None:
        left = self._open(others)
        self.progress.phase(f"estimate {len(left)} trials")
        self.standing.likely = self.standing.estimates.of(left, fits=self.standing.best is not None)
        self.standing.is_short = (
            self.standing.left_to_prove_s < (1.0 - _SLOW) * self.standing.solving.options.time_limit
        )
        queue = alternating(varied(sorted(left, key=self.standing.turn_s)))
        relaxed = solutions = 0
        while queue and relaxed < _RELAXED and solutions < _SOLVED and self.standing.left_to_try_s > 0:
            chunk: list[Trial] = []
            hasty = self.standing.is_short and self.standing.best is None
            while queue and len(chunk) < (_FIRST if hasty else _CHUNK):
                trial = queue.pop(0)
                if self.standing.is_hopeless(trial):
                    self.standing.give_up([trial])
                elif self.standing.is_good(bound_s := self.standing.fluid_of(trial).step_s):
                    self.standing.solved.append(ruled_out(trial, bound_s))
                else:
                    chunk.append(trial)
            phase = f"bound stages and micro-batches, {relaxed} of {len(left)}"
            done = self._best_first(chunk, phase, _SOLVED - solutions, queued=bool(queue))
            relaxed, solutions = relaxed + done[0], solutions + done[1]
        self.standing.give_up(queue)
        self._look_again(_RELAXED - relaxed, _SOLVED - solutions)
        self._climb()
        self._refine()

    def _look_again(self, relaxed: int, solutions: int) -> None:
        """Try what only estimates were against, of that which no bound is against, while numbers and time last.

        An estimate is of the fastest schedule, and of memory on average: that a size was slower than its own says
        little of the next smaller one.
        """
        while relaxed > 0 and solutions > 0 and self.standing.left_to_try_s > 0:
            doubted = self.standing.doubted()
            if not doubted:
                return
            chunk = doubted[: min(_CHUNK, relaxed)]
            self.standing.reopen(chunk)
            done = self._best_first(chunk, f"look again at {len(doubted)} trials", solutions, doubting=False)
            relaxed, solutions = relaxed - len(chunk), solutions - done[1]

    def first_that_fits(self) -> Solved | None:
        """Return a plan of one of the likeliest trials that time was too short for, `None` if none of them has any.

        Each has as long again as the search had; if that finds nothing, those that are left have as long as they take.

        Raises:
            KeyboardInterrupt: the user did not wait for it, and none was found by then.
        """
        standing = self.standing
        stopped = [one.trial for one in standing.solved if one.solution.status == "time_limit"]
        left = varied(sorted(stopped, key=lambda each: standing.likely.get(each, inf)))[:_SOLVED]
        for seconds in (standing.solving.options.time_limit, inf):
            for trial in left:
                self.progress.phase("time is over without a plan: the likeliest that fits")
                found = standing.solving.bound(trial, standing.wishes, seconds)
                if isinstance(found, Waiting):
                    any_plan = replace(found, gap=_ANY)
                    found = standing.solving.solve(any_plan, standing.wishes, self._ways(trial), inf, seconds)
                standing.solved = [*(one for one in standing.solved if one.trial != trial), found]
                if found.outcome is not None:
                    return found
                if found.solution.status == "interrupted":
                    raise KeyboardInterrupt
            left = [one.trial for one in standing.solved if one.trial in left and one.solution.status == "time_limit"]
        return None

    def _best_first(
        self,
        trials: Sequence[Trial],
        phase: str,
        most: int,
        *,
        doubting: bool = True,
        kept_s: float = -inf,
        queued: bool = False,
        waiting: Sequence[Turn] = (),
    ) -> tuple[int, int]:
        """Relax and solve trials, and those `waiting`, what promises most first; return how many of each.

        A trial's turn to be relaxed comes by its estimate, that to be solved by its bound, if that is larger. So a good
        plan that is found early spares the others both; and plans show by how much estimates of their kind are off.
        `doubting`: what only estimates are against is given up, too. With a plan, and `kept_s` of the time left for
        trials, the rest waits. `queued`: so do others that are not among these.
        """
        heap: list[Turn] = [*waiting, *((0.0, place, trial) for place, trial in enumerate(trials))]
        relaxed, solutions, total = 0, 0, len(heap)
        try:
            while heap:
                if self.standing.best is not None and self.standing.left_to_try_s < kept_s:
                    self._waiting = heap
                    break
                heap = [(self.standing.turn_s(one), place, one) for _, place, one in heap]
                turn = next_turn(
                    heap,
                    late=self.standing.best is None
                    and self.standing.left_to_try_s < LATE * self.standing.solving.options.time_limit,
                    planned=self.standing.best is not None,
                    failed=self._failed,
                )
                _, place, one = turn
                if isinstance(one, Waiting):
                    solutions += self._solve(
                        one,
                        most - solutions,
                        len(heap),
                        total,
                        doubting=doubting,
                        others_wait=queued or kept_s > -inf,
                    )
                    self._failed[is_staged(turn)] += self.standing.best is None
                elif one in self.standing.likely and (
                    self.standing.left_to_try_s <= 0
                    or self.standing.is_hopeless(one, doubting=doubting)
                    or self.standing.is_outdone(one, self.standing.known_bound_s(one), doubting=doubting)
                ):
                    self.standing.give_up([one])
                else:
                    self.progress.phase(phase)
                    found = self.standing.relax(one, AT_MOST if len(heap) > 1 else 1.0)
                    relaxed += 1
                    self.progress.update(done=relaxed, total=total)
                    if found is not None:
                        heap.append((found.bound_s, place, found))
                    else:
                        self._failed[is_staged(turn)] += 1
                heap.remove(turn)
        except KeyboardInterrupt:
            known = {one.trial for one in self.standing.solved}
            bounded = (one for _, _, one in heap if isinstance(one, Waiting) and one.trial not in known)
            self.standing.solved += [interrupted(each.trial, each.bound_s) for each in bounded]
            raise
        return relaxed, solutions

    def _solve(
        self, one: Waiting, most: int, left: int, total: int, *, doubting: bool = True, others_wait: bool = False
    ) -> bool:
        """Solve one of the trials left unless it is no better than the best plan; return whether it was solved.

        It may take what is left of the time where it is the last one and no `others_wait`, and a third where there is
        no plan: what takes longer (three axes over 16384 GPUs) is likely not worth it, and others are quick.
        """
        if most <= 0:
            self.standing.solved.append(left_out(one.trial, one.bound_s, "not solved: others looked better"))
            return False
        beaten_s = self.standing.best_s * self.standing.slack(one.trial)
        if self.standing.is_outdone(one.trial, one.bound_s, doubting=doubting):
            self.standing.solved.append(left_out(one.trial, one.bound_s, "not solved: others of its kind were slower"))
            if doubting:
                self.standing.left.add(one.trial)
            return False
        self.progress.phase(f"solve {left} of {len(self.standing.solved) + left}, best bound first")
        last, unplanned = left == 1 and not others_wait, self.standing.best is None
        share = (1.0 if last else _UNPLANNED if unplanned else AT_MOST) if one.ended else AT_MOST
        room_s = self.standing.left_to_try_s * share
        found = self.standing.solving.solve(one, self.standing.wishes, self._ways(one.trial), beaten_s, room_s)
        self.standing.solved.append(found)
        if found.solution.status == "interrupted":
            raise KeyboardInterrupt
        best = self.standing.best_s
        gap = max(0.0, 1.0 - one.bound_s / best) if best < inf else None
        self.progress.update(best_s=best if best < inf else None, gap=gap, done=total - left + 1, total=total)
        return found.solution.status != "cutoff" or found.outcome is not None

    def _ways(self, trial: Trial) -> list[Wanted]:
        """Return the schedules that a trial is cut for at first."""
        if trial.depth == 1:
            return []
        simplest = self.standing.wishes.wanted(trial.depth)
        likely = self.standing.fluid_of(trial).wanted or self.standing.estimates.way(trial) or simplest
        return list(dict.fromkeys([likely, simplest]))

    def _climb(self) -> None:
        """Try micro-batches of about the size of the most promising plan's: sizes that are far apart came first.

        A size that just fits is often between one that does not and one that wastes time on small operators.
        """
        left, climbed = _CLIMBED, set[Trial]()
        while left > 0 and self.standing.left_to_try_s > 0 and self.standing.wishes.microbatch is None:
            found = [
                one for one in self.standing.solved if one.outcome is not None and isinstance(one.trial.recompute, str)
            ]
            best = min(found, key=lambda each: each.step_s / self.standing.slack(each.trial), default=None)
            near = [] if best is None else [each for each in self._near(best.trial) if each not in climbed]
            if not near:
                return
            likely = self.standing.estimates.more(near, fits=self.standing.best is not None)
            # What fits with nothing recomputed rules out its like; that it looks slow rules out nothing here.
            near = sorted(near, key=lambda each: (each.recompute != "none", likely[each]))[:left]
            left -= len(near)
            climbed.update(near)
            for trial in near:
                if self.standing.left_to_try_s > 0 and not self.standing.needs_less(trial):
                    self.standing.reopen([trial])
                    self.standing.likely.pop(trial, None)
                    self._best_first([trial], "try other micro-batches", 1)

    def _near(self, trial: Trial) -> list[Trial]:
        """Return trials next to one that were not tried and may be better."""
        ways: list[Recompute] = ["none", "full"] if self.standing.mixes else [trial.recompute]
        known = {one.trial for one in self.standing.solved if one.trial not in self.standing.left}
        near = [
            replace(each, recompute=way)
            for way in ways
            for each in near_sizes(trial, self.standing.solving.program.batch_size)
        ]
        return [
            each
            for each in near
            if each not in known
            and self.standing.too_large(each) is None
            and not self.standing.is_beaten(each)
            and not self.standing.is_good(self.standing.fluid_of(each).step_s)
        ]

    def _refine(self) -> None:
        """Try the other schedules on the best pipelines, where the schedule is open."""
        if not self.standing.wishes.schedule_is_open:
            return
        piped = sorted((one for one in self.standing.solved if one.pipeline is not None), key=lambda each: each.step_s)
        for one in piped[:_REFINED]:
            if one.pipeline is None or one.outcome is None:
                continue
            bubble = one.pipeline.bubble_s / one.step_s
            if bubble <= self.standing.solving.options.gap or one.step_s * (1.0 - bubble) >= self.standing.best_s:
                continue
            self.progress.phase("try other schedules")
            ways = self.standing.other_schedules(one.trial)
            found = self.standing.solving.recut(one, ways) if ways else None
            if found is not None and found.step_s < one.step_s:
                one.pipeline, one.step_s = found, found.step_s

    def _lighten(self, left: Callable[[], float]) -> bool:
        """Recompute less in the most promising plans that recompute all, while seconds are left; return if one gained.

        Those that were looked at before are not again.
        """
        standing = self.standing
        full = [one for one in standing.solved if one.trial.recompute == "full" and one.outcome is not None]
        likely = sorted(full, key=lambda each: each.step_s / standing.slack(each.trial))
        before_s, found = standing.best_s, list[Solved]()
        # What is foreseen is off by about as much on all meshes with stages, and with micro-batches, or without either:
        # nobody knows by how much until one was tried.
        for one in (each for each in likely[:_LIGHTENED] if each.trial not in self._lightened):
            if left() <= 0:
                break  # the rest of the time is for proofs
            self._lightened.add(one.trial)
            alike, hoped_s = (one.trial.depth > 1, one.trial.microbatches > 1), one.step_s / standing.slack(one.trial)
            least_s = max(standing.lightest_s(one.trial), standing.fluid_of(one.trial).step_s)
            foreseen_s = max(least_s, self._off.get(alike, 0.0) * hoped_s)
            if foreseen_s >= standing.best_s * (1.0 - standing.solving.options.gap):
                continue
            self.progress.phase("recompute less")
            left_s, others = left(), self._reruns(one)
            lightest = lighter(standing.solving, standing.wishes, one, left_s, standing.best_s, others)
            if lightest is not None:
                standing.solved.append(lightest)
                found.append(lightest)
            step_s = (one if lightest is None else lightest).step_s
            self._off[alike] = max(self._off.get(alike, 0.0), step_s / hoped_s)
        self._bound_as_open(found)
        return standing.best_s < before_s

    def _pair(self) -> None:
        """Try twice as many micro-batches, two of them at once, where a plan waits for collectives most.

        No bound and no estimate knows that one of them computes meanwhile: on the same meshes, these come last.
        """
        standing = self.standing
        if standing.wishes.microbatch is not None or standing.wishes.batch_overlap == 1:
            return
        hoped: list[tuple[float, int, Trial]] = []
        for place, one in enumerate(standing.solved):
            if one.outcome is not None and one.pipeline is None and one.outcome.pairing is None:
                hoped_s = one.step_s - exposed_s(one.outcome)
                twice = twice_as_many(one.outcome, one.trial, standing.solving.program.batch_size)
                if twice is not None and hoped_s < standing.best_s * (1.0 - standing.solving.options.gap):
                    hoped.append((hoped_s, place, twice))
        for hoped_s, _, trial in sorted(hoped)[:_PAIRED]:
            if standing.left_s > 0 and hoped_s < standing.best_s * (1.0 - standing.solving.options.gap):
                self.progress.phase("two micro-batches at once")
                found = standing.solving.in_pairs(trial, standing.wishes, standing.left_s)
                standing.solved.append(found)
                if found.solution.status == "interrupted":
                    raise KeyboardInterrupt

    def _bound_as_open(self, solved: Sequence[Solved]) -> None:
        """Give trials that may become others which recompute less the bounds of all these."""
        for one in solved:
            if self.standing.is_open(one):
                own = one.solution.bound_s if isinstance(one.trial.recompute, str) else inf
                one.solution = replace(one.solution, bound_s=min(own, self.standing.lightest_s(one.trial)))

    def _reruns(self, one: Solved) -> list[Pipelined]:
        """Return a pipeline in other schedules, each that fits."""
        if one.pipeline is None or not self.standing.wishes.schedule_is_open:
            return []
        ways = dict.fromkeys([self.standing.wishes.wanted(one.trial.depth), *self.standing.other_schedules(one.trial)])
        worth = (each for each in ways if not self.standing.is_good(self.standing.fluid_by(one.trial, each)))
        found = (self.standing.solving.recut(one, [each]) for each in worth if each != one.pipeline.wanted)
        return [each for each in found if each is not None]
