"""The plan that needs least memory, where the search found none: it may fit, and else tells what would make it fit."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.api import infeasible
from autopar.api.kinds import shape_of
from autopar.api.solved import Solved
from autopar.api.solving import Solving
from autopar.api.wishes import Wishes
from autopar.costs.outcome import Outcome
from autopar.errors import InfeasibleError
from autopar.search.fitting import smallest_peak
from autopar.search.ilp import Limits, Solution
from autopar.search.trials import Trial
from cost_models.errors import CostModelError

_MESHES = 4
"""Meshes on which it is sought, at most."""

_SECONDS = 20.0
"""Of the processor on each of them."""

_GAP = 0.01
"""Relative to the least peak, within which it is taken."""


def smallest(solving: Solving, wishes: Wishes, solved: Sequence[Solved]) -> Solved:
    """Return the plan that needs least memory: it may fit where the search saw none that does.

    That counts values up to their last reader; what a plan holds is less where only copies are read by then.

    Raises:
        InfeasibleError: it does not fit; with how far it is from that, and what would make it fit.
    """
    failed = [one for one in solved if one.solution.status in {"infeasible", "cutoff"}]
    if wishes.depth not in {None, 1} and failed:
        raise _no_stages(solving, wishes, max(failed, key=infeasible.thrift).why_not)
    trial, least = _least(solving, wishes, failed)
    if least.memory().total > solving.budget:
        raise infeasible.memory(least, trial.ranks, solving.budget, solving.cluster, solving.options)
    return Solved(trial, Solution("gap", least.options, least.step_s, 0.0), least, least.step_s)


def _least(solving: Solving, wishes: Wishes, failed: Sequence[Solved]) -> tuple[Trial, Outcome]:
    """Return the trial and its outcome that hold least, of the few that may.

    Raises:
        InfeasibleError: none of them has a plan at all.
    """
    least: tuple[Trial, Outcome] | None = None
    refused: InfeasibleError | None = None
    no_price = ""

    def held(trial: Trial) -> float:
        return solving.rough(trial.recompute, wishes).least_bytes(shape_of(trial))

    tried = 0
    for one in infeasible.thriftiest(failed, held):
        if tried == _MESHES:
            break
        try:
            links, pricing = solving.price(one.trial, wishes)
        except InfeasibleError as error:
            refused = refused or error
            continue
        except CostModelError as error:
            no_price = no_price or str(error)
            continue
        tried += 1
        found = smallest_peak(pricing.table, Limits(solving.budget, _SECONDS, _GAP, solving.options.seed))
        if not found.options:
            continue
        graph = solving.graph(one.trial.recompute, wishes)
        outcome = Outcome(graph, pricing, links, found.options, solving.options.optimizer)
        if least is None or outcome.memory().total < least[1].memory().total:
            least = one.trial, outcome
    if least is not None:
        return least
    if refused is not None:
        raise refused
    why = no_price or (failed[0].why_not if failed else "no candidate mesh admits a plan")
    raise infeasible.wishes(why)


def _no_stages(solving: Solving, wishes: Wishes, why: str) -> InfeasibleError:
    """Return the error about stages that are asked for, of which `why` tells what one mesh inside them lacks."""
    batch, devices = solving.program.batch_size, solving.cluster.device_count
    depth, per_node = wishes.depth or 1, solving.equal.devices_per_node
    width = devices // depth
    if width % per_node and per_node % width:
        return infeasible.straddling(wishes.fixed, depth, per_node, devices)
    if set(wishes.fixed) <= {"pp"} and batch and batch % width:
        return infeasible.width_of_stages(width, devices, batch, why)
    return infeasible.wishes(why)
