"""Two micro-batches at once: what it saves of a step, and what it takes of memory."""

from __future__ import annotations

from autopar.api.naming import name_axes
from autopar.api.overlapping import tasks_as_held
from autopar.costs.batch_overlap import chains, paired, seconds_moved
from autopar.costs.issued import is_shared
from autopar.costs.outcome import Outcome, Pairing
from autopar.search.meshes import Candidate, MeshAxis, in_order
from autopar.search.trials import Trial
from autopar.simulate.streams import Replay, peak_bytes, replay

_WORTH = 0.01
"""Share of a step that collectives have to take, which nothing hides, for pairs to be looked at."""


def in_pairs(outcome: Outcome, mesh: Candidate, wanted: int | None) -> Outcome | None:
    """Return an outcome with micro-batches two at a time; `None` where they cannot be, or gain too little.

    `mesh` is its trial's, with the axis of micro-batches; `wanted` how many are to run at once, if that is not open.
    """
    worth = wanted == 2 or (wanted is None and exposed_s(outcome) > _WORTH * outcome.step_s)
    return _paired(outcome, mesh) if worth and outcome.microbatches % 2 == 0 else None


def twice_as_many(outcome: Outcome, trial: Trial, batch: int) -> Trial | None:
    """Return a solved trial with twice as many micro-batches; `None` where the batch does not divide.

    A free axis is what it turned out to be, as how many samples a rank has would be open else.
    """
    names = [axis.name for axis in name_axes(outcome, trial.mesh, ())[0].axes]
    ranks = in_order(
        axis if axis.role != "free" else MeshAxis("tp" if name.startswith("tp") else "dp_shard", axis.size)
        for axis, name in zip(trial.ranks, names, strict=True)
    )
    count = 2 * trial.microbatches
    found = Trial((MeshAxis("microbatch", count), *ranks), recompute=trial.recompute)
    return None if batch % (found.replicas * count) else found


def exposed_s(outcome: Outcome) -> float:
    """Return the seconds of a step's collectives that nothing of their own micro-batch hides: pairs save no more."""
    each_s = (
        each.times * outcome.links.hidable_s(each.message)
        for each in outcome.messages()
        if not (each.overlapped or is_shared(outcome.graph, each))
    )
    return sum(each_s)


def _paired(outcome: Outcome, mesh: Candidate) -> Outcome:
    """Return the outcome with micro-batches two at a time.

    One and two are replayed with the collectives that the search found nothing to hide behind.
    """
    one = outcome.merging(merges=False)
    tasks = chains(one, tasks_as_held(one, name_axes(one, mesh, ())[0]))
    both = paired(one, tasks)
    alone, together = replay(tasks, range(len(tasks))), replay(both.tasks, both.order)
    more = peak_bytes(both.tasks, both.order) - peak_bytes(tasks, range(len(tasks)))
    saved_s = [2.0 * first - then for first, then in zip(_phases_s(alone), _phases_s(together), strict=True)]
    seconds = seconds_moved(one, saved_s, outcome.microbatches / 2)
    return outcome.in_pairs(Pairing(seconds, max(0, more)))


def _phases_s(found: Replay) -> tuple[float, float]:
    """Return the seconds of forward and of backward."""
    tasks = found.tasks
    begin_s = next((found.start_s[at] for at in found.order if tasks[at].phase == "backward"), found.step_s)
    return begin_s, found.step_s - begin_s
