"""A plan's decisions as they are, priced for another cluster.

Every layout, gather, micro-batch, recomputation, stage and schedule is the plan's. Left to the other cluster is what
follows from its links: which collectives travel together and when they are issued, on how many levels they run, unless
the plan was made without that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from autopar.api.describing import described
from autopar.api.merging import with_room
from autopar.api.pairing import in_pairs
from autopar.api.pipelining import Pipelined, Wanted, priced_as
from autopar.api.solved import Solved
from autopar.api.solving import Solving
from autopar.api.stale import require_fresh
from autopar.capture.recompute import recomputed_graph
from autopar.costs.links import Links
from autopar.costs.outcome import Outcome
from autopar.costs.table import Builder, Pricing
from autopar.errors import StalePlanError, UsageError
from autopar.figures import format_bytes
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import with_time
from autopar.ir.plan import Decisions, Fingerprint, ParameterDecision, Plan, Solver, Warned
from autopar.ir.squeeze import squeeze
from autopar.options import PlanOptions
from autopar.search.ilp import Solution
from autopar.search.meshes import MeshAxis, Role
from autopar.search.trials import Recompute, Trial
from cost_models.cluster import ClusterSpec


def repriced(plan: Plan, graph: Graph, cluster: ClusterSpec, torch_version: str) -> Plan:
    """Return a plan with its decisions and the predictions of another cluster.

    `graph` is the program that it was made for. What does not fit in the other devices' memory is priced all the same,
    and is a warning of the plan.

    Raises:
        StalePlanError: the plan is not of this program.
        UsageError: the cluster has another number of devices, or its levels cannot hold the plan's mesh.
    """
    _require_same(plan, graph)
    decisions = squeeze(plan.decisions)
    depth = max(1, plan.decisions.degrees.get("pp", 1))
    planned = decisions.mesh.world_size * depth
    if cluster.device_count != planned:
        raise UsageError(
            f"the plan is for {planned} devices and cluster {cluster.name!r} has {cluster.device_count}; give a "
            f"cluster of {planned}, or plan anew for this one"
        )
    options = _options(plan)
    solving = Solving(graph, cluster, options)
    trial = Trial(_candidate(decisions), depth, _recompute(decisions.recompute))
    if (uneven := solving.uneven(trial)) is not None:
        raise UsageError(f"the plan's mesh does not lie on the levels of cluster {cluster.name!r}: {uneven}")
    outcome = _Decided(with_time(decisions), _as_planned(graph, decisions), solving.links(trial), options).outcome()
    if depth == 1:
        outcome = with_room(outcome, solving.budget)
        outcome = in_pairs(outcome, trial.mesh, decisions.schedule.batch_overlap) or outcome
    pipeline = _pipeline(plan, outcome, solving) if depth > 1 else None
    step_s = outcome.step_s if pipeline is None else pipeline.step_s
    solved = Solved(trial, Solution("optimal", outcome.options, step_s, 0.0), outcome, step_s, pipeline=pipeline)
    found = described(solving, solved, _mesh(decisions.mesh, outcome), plan.decisions.degrees)
    bound = min(step_s, found.floor_s)
    return replace(
        plan,
        fingerprint=Fingerprint(graph=graph.fingerprint, cluster=cluster.fingerprint(), torch=torch_version),
        cluster=cluster.to_dict(),
        decisions=found.decisions,
        estimates=found.estimates,
        solver=Solver(
            status="priced", objective=step_s, bound=bound, gap=(step_s - bound) / step_s if step_s else 0.0,
            seconds=None, seed=plan.solver.seed, candidates=1,
        ),
        alternatives=(),
        warnings=(
            *(each for each in plan.warnings if each.code in {"no-rule", "outputs-dropped"}),
            *found.warnings,
            *_too_large(found.estimates.peak_memory_bytes, found.estimates.memory_budget_bytes, cluster),
        ),
    )  # fmt: skip


def _options(plan: Plan) -> PlanOptions:
    """Return the wishes of a plan that its price depends on."""
    return PlanOptions.parse(
        precision=plan.workload.precision,
        optimizer=plan.workload.optimizer,
        memory_margin=plan.constraints.get("memory_margin"),
        reduce_dtype=plan.constraints.get("reduce_dtype"),
        overlap=plan.constraints.get("overlap"),
        two_level=plan.constraints.get("two_level"),
        keep_outputs=not plan.decisions.outputs_dropped,
    )


def _require_same(plan: Plan, graph: Graph) -> None:
    if plan.fingerprint.graph != graph.fingerprint:
        require_fresh(plan, graph, plan.fingerprint.torch)
        raise StalePlanError(f"the plan for {plan.workload.model} is of another program than this one")


def _candidate(decisions: Decisions) -> tuple[MeshAxis, ...]:
    count = decisions.schedule.num_microbatches
    ranks = tuple(MeshAxis(cast("Role", _kind(axis.name)), axis.size) for axis in decisions.mesh.axes)
    return (MeshAxis("microbatch", count), *ranks) if count > 1 else ranks


def _kind(name: str) -> str:
    """Return what an axis is for: `tp` of `tp_2`."""
    return re.sub(r"_\d+$", "", name)


def _recompute(ways: Mapping[str, str]) -> Recompute:
    if not ways:
        return "none"
    return cast("Recompute", ways["*"] if set(ways) == {"*"} else tuple(sorted(ways.items())))


def _as_planned(graph: Graph, decisions: Decisions) -> Graph:
    """Return the program that the decisions name: some of it recomputed, equal layers apart where they differ.

    Raises:
        StalePlanError: the decisions leave out operators.
    """
    found = recomputed_graph(graph, decisions.recompute) if decisions.recompute else graph
    if any(op.name not in decisions.operators for op in found.ops if found.representative(op.name) == op.name):
        raise StalePlanError("the plan does not decide every operator of this program; plan anew")
    apart = any(op.name in decisions.operators for op in found.ops if found.representative(op.name) != op.name)
    return replace(found, fold={}) if apart else found


def _mesh(mesh: Mesh, outcome: Outcome) -> Mesh:
    """Return a mesh with the link levels that its axes cross on this cluster."""
    time = outcome.links.time_axes
    return Mesh(tuple(replace(axis, level=outcome.links.level(at + time)) for at, axis in enumerate(mesh.axes)))


def _pipeline(plan: Plan, outcome: Outcome, solving: Solving) -> Pipelined:
    """Return the plan's stages on their ranks, simulated."""
    stages, schedule = plan.decisions.stages, plan.decisions.schedule
    depth = plan.decisions.degrees["pp"]
    wanted = Wanted(depth, schedule.name, schedule.interleave)
    rank_of = wanted.schedule_for(schedule.num_microbatches).rank_of
    width = outcome.links.cluster.device_count // depth
    order = [0] * depth
    for stage, rank in zip(sorted(stages, key=lambda each: each.index), rank_of, strict=True):
        order[rank] = stage.ranks[0] // width
    return priced_as(outcome, wanted, solving.places(depth), [each.blocks for each in stages], tuple(order))


def _too_large(peak_bytes: int, budget_bytes: int, cluster: ClusterSpec) -> tuple[Warned, ...]:
    if peak_bytes <= budget_bytes:
        return ()
    text = (
        f"the plan needs {format_bytes(peak_bytes)} on the fullest device and {cluster.name!r} leaves "
        f"{format_bytes(budget_bytes)}: it does not fit; plan anew for this cluster"
    )
    return (Warned(code="does-not-fit", text=text),)


@dataclass
class _Decided:
    """The one assignment of a program that decisions name, priced."""

    decisions: Decisions
    """With an axis of micro-batches."""

    graph: Graph
    links: Links
    options: PlanOptions

    def outcome(self) -> Outcome:
        """Return what the decisions stand for."""
        found = self.decisions.operators
        reps = {self.graph.representative(op.name) for op in self.graph.ops}
        parameters = self.decisions.parameters.values()
        pricing = Builder(
            self.graph,
            {rep: (found[rep].strategy,) for rep in reps},
            self.links,
            self.options.optimizer,
            frozenset(each.gather for each in parameters if each.gather != "none") or frozenset({"per_phase"}),
            frozenset(each.reduce for each in parameters),
            self.options.reduce_dtype == "fp32",
            outputs=self.decisions.outputs,
        ).build()
        keep = self.options.keep_outputs
        optimizer, on = self.options.optimizer, self.options.overlap
        return Outcome(self.graph, pricing, self.links, self._options(pricing), optimizer, on, keep_outputs=keep)

    def _options(self, pricing: Pricing) -> tuple[int, ...]:
        """Return the place of each node's decided option."""
        chosen = [0] * len(pricing.table.nodes)
        by_name = self.graph.by_name
        for place, cluster in enumerate(pricing.clusters):
            op = by_name[cluster.members[0]]
            if op.kind == "parameter" and cluster.once:
                chosen[place] = self._way(cluster.once, cluster.early, self.decisions.parameters[self._name(op.target)])
        return tuple(chosen)

    def _name(self, target: str) -> str:
        return self.graph.aliases.get(target, (target,))[0]

    @staticmethod
    def _way(once: list[bool], early: list[bool], decided: ParameterDecision) -> int:
        """Return the option that gathers and reduces as decided; what is not gathered may be of either kind."""
        ways = enumerate(zip(once, early, strict=True))
        kept, now = decided.gather == "once", decided.reduce == "microbatch"
        alike = (at for at, way in ways if way[1] == now and (decided.gather == "none" or way[0] == kept))
        return next(alike, 0)
