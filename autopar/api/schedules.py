"""The schedules that a pipeline may be run by, and what estimates read of them."""

from __future__ import annotations

from functools import lru_cache

from autopar.api.pipelining import Wanted
from autopar.api.wishes import Wishes
from autopar.costs.rough import Run
from autopar.search.closed_forms import idle_share
from autopar.search.trials import Trial


def ways_to_run(trial: Trial, wishes: Wishes, blocks: int) -> list[Wanted]:
    """Return the schedules of a trial whose program has so many blocks: the simplest, and others if they are open."""
    if trial.depth == 1:
        return []
    simplest = [wishes.wanted(trial.depth)]
    return [*simplest, *(other_schedules(trial, wishes, blocks) if wishes.schedule_is_open else ())]


def other_schedules(trial: Trial, wishes: Wishes, blocks: int) -> list[Wanted]:
    """Return the schedules of a pipeline beside the simplest."""
    most = blocks // trial.depth
    found = [Wanted(trial.depth, "zb_h1")]
    if "interleave" not in wishes.never and trial.microbatches >= trial.depth:
        times = sorted({each for each in (2, 4, min(8, most)) if 1 < each <= most})
        found += [Wanted(trial.depth, "interleaved_1f1b", each) for each in times]
        found += [Wanted(trial.depth, "zbv", 2)] if most >= 2 else []
    return found


@lru_cache(maxsize=4096)
def run_of(wanted: Wanted, microbatches: int) -> Run:
    """Return what estimates read of a schedule."""
    ranks, rounds = wanted.depth, wanted.interleave
    idle = idle_share(wanted.schedule, ranks=ranks, interleave=rounds, microbatches=microbatches)
    # Interleaved 1F1B warms up with two steps more for each rank behind, zbv with none; gpipe with all there are.
    ahead = {"interleaved_1f1b": (ranks - 1) / rounds, "gpipe": float(microbatches)}.get(wanted.schedule, 0.0)
    return Run(idle, ahead, rounds)
