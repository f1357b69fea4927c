"""The timeline that a plan predicts, from the figures in its file alone."""

from __future__ import annotations

from autopar.ir.pipeline import Edge, PipelineCosts, StageCost
from autopar.ir.plan import Plan
from autopar.ir.timeline import Timeline
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate
from autopar.simulate.sharing import shared_cores
from cost_models.cluster import ClusterSpec


def planned_timeline(plan: Plan) -> Timeline | None:
    """Return when each pipeline rank does what, up to the last micro-batch; `None` for a plan without stages.

    What follows the last micro-batch (reductions of gradients, the optimizer) is not in it, nor are bytes.
    """
    stages, schedule = plan.decisions.stages, plan.decisions.schedule
    found = sorted(plan.estimates.per_stage, key=lambda each: each.index)
    if len(stages) < 2 or len(found) != len(stages) or not any(each.forward_s for each in found):
        return None
    costs = PipelineCosts(
        tuple(
            StageCost(
                forward_s=each.forward_s,
                input_gradient_s=each.input_gradient_s,
                weight_gradient_s=each.weight_gradient_s,
                forward_waiting_s=each.forward_waiting_s,
                input_gradient_waiting_s=each.input_gradient_waiting_s,
                weight_gradient_waiting_s=each.weight_gradient_waiting_s,
            )
            for each in found
        ),
        tuple(Edge(each.index, each.index + 1, each.send_forward_s, each.send_backward_s) for each in found[:-1]),
    )
    ranks = len({stage.ranks for stage in stages})
    made = generate(schedule.name, ranks=ranks, microbatches=schedule.num_microbatches, interleave=schedule.interleave)
    return simulate(made, costs, shared=shared_cores(ClusterSpec.from_dict(plan.cluster), len(stages[0].ranks)))
