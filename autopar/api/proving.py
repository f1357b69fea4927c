"""How much better a plan could be than the best that was found: bounds of what the search left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod

from autopar.api.kinds import Alone, alone
from autopar.api.solved import Solved, ruled_out
from autopar.api.standing import Standing, kin, without
from autopar.search.trials import Trial

_MESHES = 24
"""Meshes of one stage whose whole program is relaxed only to bound what was not tried."""

_MORE = 2.0
"""Times as much as on like meshes that collectives of gradients and parameters are taken to add at most."""

_Like = tuple[Alone, bool, bool]
"""Meshes on which these take about as long: ranks that share each sample, whether they leave their node, and whether
there are several micro-batches, of which one alone can hide them."""

_BOUNDED = 1000
"""Times at most that the weakest bound is looked at."""


def _relax_plain(standing: Standing, trial: Trial) -> None:
    """Bound a trial's mesh whatever is recomputed: nothing is, and memory is no limit."""
    free_s = standing.estimates.relaxed_s(replace(trial, recompute="none"), standing.left_to_prove_s)
    standing.learn(replace(trial, recompute="none"), free_s / standing.solving.at_once(trial))


def prove(standing: Standing) -> None:
    """Bound, as a fluid, the trials that leave the most room below the best plan; relax where that says nothing.

    What work alone takes is known for all of one kind of ranks at once, fluids take hundredths of a second, tight ones
    tenths and relaxations seconds: each is asked only where the one before leaves a trial the weakest.
    """
    looked: Counter[Trial] = Counter()
    tightened: set[Trial] = set()
    relaxed = 0
    added: dict[_Like, float] = {}
    for _ in range(_BOUNDED):
        left = [
            one for one in standing.solved if one.solution.status != "infeasible" and standing.solving.proves(one.trial)
        ]
        least = min(left, key=lambda each: each.solution.bound_s, default=None)
        if least is None or standing.left_to_prove_s <= 0 or standing.is_good(least.solution.bound_s):
            return
        if (work_s := min(standing.work_s(least.trial), least.step_s)) > least.solution.bound_s:
            least.solution = replace(least.solution, bound_s=work_s)
            continue
        times = looked[least.trial]
        if times and least.trial.depth > 1 and least.trial not in tightened:
            standing.tighten(least.trial)
            tightened.add(least.trial)
        fluid_s = _fluid_s(standing, least)
        unknown = fluid_s == 0.0 and standing.is_open(least)
        bound_s = max(fluid_s, _known_s(standing, least))
        tighter = times > 0 and bound_s > least.solution.bound_s
        if times and not tighter and not standing.is_good(bound_s) and relaxed < _MESHES:
            whole = _whole(standing, least.trial, left if times == 1 else ())
            by_itself = unknown or whole is None or least.trial.replicas == 1
            if by_itself and standing.is_open(least) and without(least.trial) not in standing.free_s:
                _relax_plain(standing, least.trial)
                relaxed += 1
            elif not unknown and least.trial.replicas > 1 and whole is not None:
                # Collectives of gradients and parameters are in no fluid. Where they were little on like meshes, they
                # are not much more here: they move as many bytes, whatever share of the work is left to a rank.
                plain, kind = replace(least.trial, recompute="none"), _like(standing, whole)
                more_s = _MORE * added.get(kind, inf) / standing.solving.at_once(plain)
                # What experts on ranks of their own take is estimated, and bounded by nothing but a relaxation.
                apart = standing.estimates.is_unknown(plain)
                if apart or standing.estimates.bound_s(plain) + more_s >= bound_s:
                    _relax_plain(standing, whole)
                    relaxed += 1
                    if not apart:
                        added[kind] = max(added.get(kind, 0.0), _collectives_s(standing, whole))
        looked[least.trial] += not tighter
        bound_s = max(bound_s, _known_s(standing, least))
        if times > 1 and bound_s <= least.solution.bound_s:
            return
        if least.outcome is None and bound_s == inf:
            found = ruled_out(least.trial, inf)
            least.solution, least.why_not = found.solution, found.why_not
        elif bound_s > least.solution.bound_s:
            least.solution = replace(least.solution, bound_s=min(bound_s, least.step_s))


def _fluid_s(standing: Standing, one: Solved) -> float:
    """Return a trial's bound as a fluid: where that is enough, that of recomputing any of it in place of none."""
    if standing.mixes and one.trial.recompute == "none":
        any_way_s = standing.fluid_of(replace(one.trial, recompute="full")).step_s
        if standing.is_good(any_way_s):
            return any_way_s
    return standing.fluid_of(one.trial).step_s


def raise_bounds(standing: Standing) -> None:
    """Give each trial the best bound known by now: what was relaxed after it was given up may bound it, too."""
    for one in standing.solved:
        known_s = _known_s(standing, one)
        if one.solution.status != "infeasible" and one.solution.bound_s < known_s < inf:
            one.solution = replace(one.solution, bound_s=min(known_s, one.step_s))


def _known_s(standing: Standing, one: Solved) -> float:
    """Return a bound from what was relaxed: of what may recompute less, one that holds whatever is recomputed."""
    return standing.lightest_s(one.trial) if standing.is_open(one) else standing.known_bound_s(one.trial)


def _whole(standing: Standing, trial: Trial, left: Sequence[Solved]) -> Trial | None:
    """Return the whole program on a stage's mesh, to be relaxed; `None` if all that bounds the trial was.

    What runs once a step hides behind one micro-batch at most. So there are as few as any of those `left` on that mesh
    have, which bounds all of them: as many as the trial has only where that is not enough, and none are left.
    """
    several = [one.trial for one in left if one.trial.ranks == trial.ranks and one.trial.microbatches > 1]
    fewest = min(several, key=lambda each: each.microbatches, default=trial) if trial.microbatches > 1 else trial
    return Trial(fewest.mesh) if kin(Trial(fewest.mesh)) not in standing.free_s else None


def _like(standing: Standing, whole: Trial) -> _Like:
    """Return what tells on which other meshes collectives take about as long."""
    leaves = prod(axis.size for axis in whole.ranks) > standing.solving.equal.devices_per_node
    return alone(whole), leaves, whole.microbatches > 1


def _collectives_s(standing: Standing, whole: Trial) -> float:
    """Return what the relaxed program takes beyond its work on the ranks that share a sample."""
    work_s = standing.estimates.work_s(whole)
    return max(0.0, standing.free_s[kin(whole)] - work_s) if work_s else inf


def proven_s(standing: Standing, one: Solved, *, pairs: bool = False) -> float:
    """Return seconds that no plan of a trial beats; 0 if nothing is known, or time too short to find out.

    Where stages are on unlike devices, the bound of its solution says nothing for sure. Bounds are of micro-batches one
    after another: of programs that may run them in `pairs`, only what their work takes is proven.
    """
    if pairs and one.trial.depth == 1:
        return min(one.solution.bound_s, standing.work_s(one.trial))
    if standing.solving.proves(one.trial):
        return one.solution.bound_s
    if standing.left_to_prove_s <= 0 and not standing.knows_fluid_of(one.trial):
        return 0.0
    return standing.fluid_of(one.trial).step_s
