"""Whether a plan still fits what it is about to run, and what differs if it does not."""

from __future__ import annotations

from autopar.errors import StalePlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from cost_models.cluster import ClusterSpec

_SHOWN = 4


def require_fresh(plan: Plan, graph: Graph, torch_version: str, cluster: ClusterSpec | None = None) -> None:
    """Check that a plan was made for this program, and for this cluster if one is given.

    Raises:
        StalePlanError: it was not; the text says what differs.
    """
    differs: list[str] = []
    if cluster is not None and plan.fingerprint.cluster != cluster.fingerprint():
        planned = plan.cluster.get("name", "?")
        differs.append(
            f"cluster: planned for {planned!r}, running on {cluster.name!r} ({cluster.device_count} devices)"
        )
    if plan.fingerprint.graph != graph.fingerprint:
        if plan.fingerprint.torch != torch_version:
            differs.append(f"torch: planned with {plan.fingerprint.torch}, running {torch_version}")
        differs += _program(plan, graph) or ["program: same parameters and sizes, other operators"]
    if differs:
        lines = "\n".join(f"    {line}" for line in differs)
        raise StalePlanError(
            f"the plan for {plan.workload.model} is stale:\n{lines}\nplan again with `autopar plan`, or give the "
            "model, cluster and torch that it was made for"
        )


def _program(plan: Plan, graph: Graph) -> list[str]:
    """Return what differs between the planned program and this one, as far as the plan tells."""
    differs = []
    if plan.workload.global_batch != graph.batch_size:
        differs.append(f"global batch: planned {plan.workload.global_batch}, got {graph.batch_size}")
    here = {
        name: op
        for op in graph.ops
        if op.kind in {"parameter", "buffer"}
        for name in graph.aliases.get(op.target, (op.target,))
    }
    planned = plan.decisions.parameters
    for what, names in (("missing", set(planned) - set(here)), ("new", set(here) - set(planned))):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
            differs.append(f"{len(names)} {what} parameters or buffers: {shown}")
    of_target = {each.target: each.output for each in plan.decisions.operators.values()}  # names of operators move
    shapes = [
        f"{op.target}: planned {known}, got {op.outputs[0]}"
        for op in graph.ops
        if op.kind != "call" and (known := of_target.get(op.target)) is not None and known != op.outputs[0]
    ]
    differs += shapes[:_SHOWN]
    targets = {name for name in plan.decisions.operators if name in graph.by_name}
    changed = [n for n in sorted(targets) if graph.by_name[n].target != plan.decisions.operators[n].target]
    if changed and not differs:
        one = changed[0]
        differs.append(
            f"operator {one}: planned {plan.decisions.operators[one].target}, got {graph.by_name[one].where}"
        )
    return differs
