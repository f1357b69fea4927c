"""What the axes of a solved mesh turned out to be, in the field's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.costs.operators import flops
from autopar.costs.outcome import Outcome
from autopar.ir.mesh import AXIS_NAMES, Axis, Mesh
from autopar.ir.placement import Replicate, Shard
from autopar.ir.roles import parameter_like
from autopar.search.meshes import Candidate, Role


def name_axes(outcome: Outcome, candidate: Candidate, fixed: Collection[str]) -> tuple[Mesh, dict[str, int]]:
    """Return the mesh with its axes named after what the plan does along them, and the degree of each kind.

    An axis along which operators use parameters in pieces is `tp`; one that only keeps parameters in
    pieces at rest is `dp_shard`; else it is `dp_replicate`. A kind whose degree the user `fixed` is left to the axis
    that has it: others that are like it have the next kind's name. A name that comes again gets a number.
    """
    time = outcome.links.time_axes
    places = range(time, len(candidate))
    names = [_name(outcome, at, candidate[at].role, fixed) for at in places]
    sizes = [axis.size for axis in candidate[time:]]
    axes = tuple(Axis(_numbered(names, at - time), candidate[at].size, outcome.links.level(at)) for at in places)
    return Mesh(axes), degrees(names, sizes)


def degrees(names: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """Return the degree of each kind of parallelism, 1 where there is none."""
    found = dict.fromkeys(AXIS_NAMES, 1)
    for name, size in zip(names, sizes, strict=True):
        found[name] *= size
    return found


def wished(candidate: Candidate) -> Mapping[str, int]:
    """Return the degrees of a candidate that was not solved to the end."""
    ranks = [axis for axis in candidate if axis.role != "microbatch"]
    return degrees([axis.role if axis.role != "free" else "tp" for axis in ranks], [axis.size for axis in ranks])


def repeating(outcome: Outcome, mesh: Mesh) -> list[Axis]:
    """Return the axes of a named mesh whose ranks do most of the products on equal values: nothing is split there."""
    graph, time = outcome.graph, outcome.links.time_axes
    alike = [0.0] * len(mesh.axes)
    total = 0.0
    for op in graph.ops:
        work = flops(op, [graph.meta(ref) for ref in op.refs])
        if not work:
            continue
        total += work
        for at, strategy in enumerate(outcome.strategy(graph.representative(op.name)).axes[time:]):
            if all(each in {None, Replicate()} for each in (*strategy.inputs, *strategy.outputs)):
                alike[at] += work
    return [axis for axis, work in zip(mesh.axes, alike, strict=True) if axis.size > 1 and work > total / 2]


def _numbered(names: Sequence[str], place: int) -> str:
    before = sum(name == names[place] for name in names[:place])
    return f"{names[place]}_{before + 1}" if before else names[place]


def _name(outcome: Outcome, at: int, role: Role, fixed: Collection[str]) -> str:
    if role not in {"free", "dp_shard"} or role in fixed:
        return role
    if role == "free" and _uses_pieces(outcome, at):
        return "tp"
    likely = ("dp_shard",) if _is_sharded(outcome, at) else ("dp_replicate", "dp_shard")
    # Where `tp` is fixed, no axis is free for any use.
    return next((kind for kind in likely if kind not in fixed), "tp")


def _uses_pieces(outcome: Outcome, axis: int) -> bool:
    """Return whether most of the work done on parameters along the axis is done on pieces of them."""
    graph = outcome.graph
    starts = parameter_like(graph)
    split = whole = 0.0
    for op in graph.ops:
        places = [i for i, ref in enumerate(op.refs) if ref.op in starts]
        if op.kind != "call" or op.name in starts or not places:
            continue
        work = flops(op, [graph.meta(ref) for ref in op.refs]) + 1.0
        strategy = outcome.strategy(graph.representative(op.name)).axes[axis]
        if any(isinstance(strategy.inputs[i], Shard) for i in places):
            split += work
        else:
            whole += work
    return split > whole


def _is_sharded(outcome: Outcome, axis: int) -> bool:
    """Return whether any parameter is in pieces at rest along the axis."""
    parameters = (op for op in outcome.graph.ops if op.kind == "parameter")
    layouts = (outcome.layout(outcome.graph.representative(op.name)) for op in parameters)
    return any(isinstance(layout[axis], Shard) for layout in layouts)
