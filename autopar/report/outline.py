"""What every report reads of a plan: its summary line, its parameters and operators in groups, its edges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.figures import format_bytes, format_degrees, format_seconds
from autopar.ir.placement import Layout, short
from autopar.ir.plan import Breakdown, OperatorDecision, ParameterDecision, Plan, Solver, Workload
from autopar.ir.reshard import NoRouteError, route
from autopar.ir.tensor import TensorMeta

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


_TIME_PARTS = (
    ("compute", "compute_s"),
    ("exposed communication", "exposed_communication_s"),
    ("bubble", "bubble_s"),
    ("optimizer", "optimizer_s"),
)

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary", "reserved")
"""What a device's memory holds: fields of `Memory`."""


def time_parts(breakdown: Breakdown) -> list[tuple[str, float]]:
    """Return what a step's time is made of, by names for people; waiting for the host where there is any."""
    parts = [(name, float(getattr(breakdown, field))) for name, field in _TIME_PARTS]
    return [*parts, ("waiting for the host", breakdown.host_s)] if breakdown.host_s > 0 else parts


def has_unlike_stages(plan: Plan) -> bool:
    """Return whether stages run on unlike devices."""
    return len({each.devices for each in plan.estimates.per_stage}) > 1


def summary(plan: Plan) -> str:
    """Return one line with degrees, step time, peak memory, MFU and gap."""
    estimates, solver = plan.estimates, plan.solver
    return (
        f"plan: {format_degrees(plan.decisions.degrees)}, step {format_seconds(estimates.step_time_s)}, "
        f"peak memory {format_bytes(estimates.peak_memory_bytes)} of {format_bytes(estimates.memory_budget_bytes)}, "
        f"MFU {estimates.mfu:.1%}, {gap_text(solver)}"
    )


_ENDED = {
    "optimal": " (optimal)",
    "gap": "",
    "time_limit": " (at the time limit: a longer one looks further)",
    "interrupted": " (interrupted)",
}
"""What is said of the way that a search ended, behind its gap."""


def gap_text(solver: Solver) -> str:
    """Return how far a plan is from what was proven, and why the search ended there."""
    if solver.status == "priced":
        return "priced as it is, not searched"
    return f"gap {solver.gap:.2%}{_ENDED[solver.status]}"


def settled(workload: Workload) -> str:
    """Return the model's reference with what `--set` gave it: `hf:llama --set num_hidden_layers=4`."""
    return " ".join([workload.model, *(f"--set {key}={value}" for key, value in workload.settings.items())])


def layout_text(layout: Layout | None) -> str:
    """Return a layout in short form, one placement an axis: `S0 R`; `-` for what is no tensor or lies on no axis."""
    return " ".join(map(short, layout)) if layout else "-"


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters of equal layers with equal decisions."""

    name: str
    """Their common name, `*` for the layer's number."""

    decision: ParameterDecision
    count: int
    meta: TensorMeta | None
    """Global shape of one of them, where the plan tells."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all of them together, unsharded; 0 where the plan does not tell."""
        return self.meta.nbytes * self.count if self.meta else 0


def parameter_groups(plan: Plan) -> tuple[ParameterGroup, ...]:
    """Return the parameters, those of equal layers once, largest first."""
    metas = {each.target: each.output for each in plan.decisions.operators.values() if each.output}
    members: dict[tuple[str, ParameterDecision], list[str]] = {}
    for name, decision in plan.decisions.parameters.items():
        members.setdefault((_INDEX.sub("*", name), decision), []).append(name)
    groups = []
    for (pattern, decision), names in members.items():
        meta = next((metas[name] for name in names if name in metas), None)
        groups.append(ParameterGroup(pattern if len(names) > 1 else names[0], decision, len(names), meta))
    return tuple(sorted(groups, key=lambda each: (-each.nbytes, each.name)))


def costly_operators(plan: Plan) -> tuple[tuple[str, OperatorDecision], ...]:
    """Return the operators that take time, the most expensive first, equal layers once."""
    taking = [(name, each) for name, each in plan.decisions.operators.items() if each.predicted_s > 0]
    return tuple(sorted(taking, key=lambda pair: (-pair[1].predicted_s * pair[1].instances, pair[0])))


@dataclass(frozen=True, slots=True)
class Edge:
    """One operator reading what another makes, with the collectives in between."""

    source: str
    target: str
    steps: tuple[str, ...]
    """`all_gather tp`; steps without communication left out."""

    known: bool
    """Whether the source stands in the plan; an operator of an equal layer does not."""


def edges(plan: Plan) -> Iterator[Edge]:
    """Yield every edge of the program, operators in the plan's order."""
    for name in plan.decisions.operators:
        yield from edges_into(plan, name)


def edges_into(plan: Plan, name: str) -> Iterator[Edge]:
    """Yield the edges into the operator `name`, in the order of its arguments.

    An input is the name of its producer, followed by `:INDEX` where it is not the producer's first output.
    """
    operators = plan.decisions.operators
    reader = operators[name]
    for text, needed in zip(reader.inputs, reader.strategy.inputs, strict=False):
        producer, _, index = text.partition(":")
        made = operators.get(producer)
        if made is None:
            yield Edge(producer, name, (), known=False)
            continue
        at = int(index or 0)
        have = made.strategy.outputs[at] if at < len(made.strategy.outputs) else None
        meta = made.output if at == 0 else None
        yield Edge(producer, name, _collectives(plan, have, needed, meta), known=True)


def _collectives(plan: Plan, have: Layout | None, need: Layout, meta: TensorMeta | None) -> tuple[str, ...]:
    if have is None or have == need:
        return ()
    mesh = plan.decisions.mesh
    unnamed = (f"{layout_text(have)} to {layout_text(need)}",)
    if meta is None:
        return unnamed
    try:
        steps = route(have, need, meta.shape, mesh.sizes)
    except NoRouteError:
        return unnamed
    return tuple(f"{step.kind} {mesh.names[step.axis]}" for step in steps if step.communicates)
