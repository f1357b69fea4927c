"""Why a plan is as it is: a choice, what it was weighed against, and where its figures come from."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import UsageError
from autopar.figures import format_bytes, format_degrees, format_seconds
from autopar.ir.placement import local_shape
from autopar.ir.plan import Collective, Plan
from autopar.report.outline import (
    MEMORY_PARTS,
    edges_into,
    gap_text,
    has_unlike_stages,
    layout_text,
    summary,
    time_parts,
)
from autopar.suggest import did_you_mean


def explain(plan: Plan, node: str | None = None) -> str:
    """Return the reasons for the whole plan, or for a parameter, an operator or every operator of a module.

    Raises:
        UsageError: nothing in the plan is called `node`.
    """
    if node is None:
        return "\n".join([*_whole(plan), ""])
    decided = plan.decisions
    lines = list(_parameter(plan, node)) if node in decided.parameters else []
    names = [
        name
        for name, each in decided.operators.items()
        if name == node or (not lines and (each.module == node or each.module.startswith(f"{node}.")))
    ]
    for name in names:
        lines += [*([""] if lines else []), *_operator(plan, name)]
    if not lines:
        raise no_such_node(plan, node)
    return "\n".join([*lines, ""])


def no_such_node(plan: Plan, node: str) -> UsageError:
    """Return the error about a name that the plan does not know."""
    decided = plan.decisions
    modules = {each.module for each in decided.operators.values() if each.module}
    known = [*decided.parameters, *decided.operators, *sorted(modules)]
    ends = [each for each in known if each.endswith(f".{node}")]
    meant = f" (did you mean {ends[0]!r}?)" if ends else did_you_mean(node, known)
    return UsageError(
        f"the plan has no parameter, operator or module {node!r}{meant}; of equal layers it holds "
        "the first only. `autopar show PLAN --format json` has every name"
    )


def _whole(plan: Plan) -> Iterator[str]:
    estimates, solver = plan.estimates, plan.solver
    yield summary(plan)
    yield ""
    if solver.status == "priced":
        yield (
            f"no search: the decisions of another plan at {format_seconds(solver.objective)}; the devices' peak rates "
            f"allow no plan below {format_seconds(solver.bound)}"
        )
    else:
        yield (
            f"search: {solver.candidates} candidates; objective {format_seconds(solver.objective)}, no plan can be "
            f"below {format_seconds(solver.bound)}; {gap_text(solver)}, seed {solver.seed}"
        )
    yield from (f"demanded: {key} = {value}" for key, value in plan.constraints.items())
    yield ""
    yield "weighed against:" if plan.alternatives else "weighed against: nothing else was kept"
    for each in plan.alternatives:
        step = "" if each.step_time_s is None else f" step {format_seconds(each.step_time_s)},"
        yield f"  {format_degrees(each.degrees)}:{step} {each.why_not}"
    yield ""
    yield "figures:"
    spent = (f"{name} {format_seconds(seconds)}" for name, seconds in time_parts(estimates.breakdown))
    yield f"  step {format_seconds(estimates.step_time_s)} = {' + '.join(spent)}"
    held = (f"{name} {format_bytes(getattr(estimates.memory, name))}" for name in MEMORY_PARTS)
    yield f"  peak {format_bytes(estimates.peak_memory_bytes)} = {' + '.join(held)}"
    yield from (f"  {name}: {source}" for name, source in estimates.sources.items())
    if has_unlike_stages(plan):
        yield ""
        yield "devices of the stages:"
        ranks = {stage.index: stage.ranks for stage in plan.decisions.stages}
        for found in estimates.per_stage:
            own = ranks[found.index]
            yield (
                f"  stage {found.index}: {found.devices}, ranks {own[0]} to {own[-1]}; busy "
                f"{format_seconds(found.step_time_s)}, peak {format_bytes(found.peak_memory_bytes)} of "
                f"{format_bytes(found.memory_budget_bytes)}"
            )


def _parameter(plan: Plan, name: str) -> Iterator[str]:
    decision = plan.decisions.parameters[name]
    yield f"parameter {name}"
    for axis, placement in zip(plan.decisions.mesh.axes, decision.placements, strict=True):
        yield f"  on {axis.name} (size {axis.size}, {axis.level or 'one level'}): {placement}"
    gather = {
        "none": "used as it lies",
        "per_phase": "gathered for the forward pass and again for the backward pass",
        "once": "gathered once, kept until the backward pass",
    }
    if plan.decisions.schedule.num_microbatches > 1:
        gather["once"] = "gathered once a step, kept for all micro-batches"
        reduced = {"step": "their sum over micro-batches", "microbatch": "each micro-batch's"}
        yield f"  of its gradients, {reduced[decision.reduce]} is brought to where it lies"
    yield f"  {gather[decision.gather]}; stage {decision.stage}"
    for meta in (each.output for each in plan.decisions.operators.values() if each.target == name and each.output):
        local = local_shape(meta.shape, decision.placements, plan.decisions.mesh.sizes)
        yield f"  {meta}, of which a device holds {list(local)}"
    yield from _communication(plan, name)


def _operator(plan: Plan, name: str) -> Iterator[str]:
    each = plan.decisions.operators[name]
    where = ", ".join(part for part in (each.module, each.source) if part)
    yield f"operator {name}: {each.target}{f' ({where})' if where else ''}"
    if each.instances > 1:
        yield f"  stands for {each.instances} equal operators"
    for axis, strategy in zip(plan.decisions.mesh.axes, each.strategy.axes, strict=True):
        yield f"  on {axis.name} (size {axis.size}): {strategy}"
        for inner in strategy.inner:
            yield f"    with its own {inner.op} ({inner.reduce}, {inner.dtype}, {inner.times} x)"
    for edge in edges_into(plan, name):
        steps = " then ".join(edge.steps) if edge.steps else "as it lies"
        yield f"  reads {edge.source}: {steps if edge.known else 'of an equal layer'}"
    if each.output is not None and each.strategy.outputs and each.strategy.outputs[0] is not None:
        local = local_shape(each.output.shape, each.strategy.outputs[0], plan.decisions.mesh.sizes)
        yield f"  makes {each.output} as {layout_text(each.strategy.outputs[0])}, of which a device holds {list(local)}"
    if each.predicted_s:
        total = f", {format_seconds(each.predicted_s * each.instances)} in all" if each.instances > 1 else ""
        yield f"  takes {format_seconds(each.predicted_s)}{total}"
    if "compute" in plan.estimates.sources:
        yield f"  source of the time: {plan.estimates.sources['compute']}"
    yield from _communication(plan, name)


def _communication(plan: Plan, name: str) -> Iterator[str]:
    found = [each for each in plan.decisions.collectives if each.tensor.split(" ")[0] == name]
    yield from (f"  {_traffic(each)}" for each in found)
    if found and "communication" in plan.estimates.sources:
        yield f"  source of the collectives' time: {plan.estimates.sources['communication']}"


def _traffic(each: Collective) -> str:
    hidden = "behind computation" if each.overlapped else "exposed"
    return (
        f"{each.phase}: {each.op} over {each.axis} ({each.level}), {each.count} x {format_bytes(each.bytes)}, "
        f"{format_seconds(each.predicted_s)} {hidden}"
    )
