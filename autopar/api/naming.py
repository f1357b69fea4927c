"""What the axes of a solved mesh turned out to be, in the field's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.costs.operators import flops
from autopar.costs.outcome import Outcome
from autopar.ir.mesh import AXIS_NAMES, Axis, Mesh
from autopar.ir.placement import Replicate, Shard
from autopar.ir.roles import parameter_like
from autopar.search.meshes import Candidate


def name_axes(outcome: Outcome, candidate: Candidate) -> tuple[Mesh, dict[str, int]]:
    """Return the mesh with its axes named after what the plan does along them, and the degree of each kind.

    An axis along which operators use parameters in pieces is `tp`; one that only keeps parameters in
    pieces at rest is `dp_shard`; else it is `dp_replicate`. A name that comes again gets a number.
    """
    time = outcome.links.time_axes
    places = range(time, len(candidate))
    names = [candidate[at].role if candidate[at].role != "free" else _role(outcome, at) for at in places]
    names = [_unsharded(outcome, at, name) for at, name in zip(places, names, strict=True)]
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


def _role(outcome: Outcome, axis: int) -> str:
    """Return `tp` if most of the work done on parameters along the axis is done on pieces of them."""
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
    return "tp" if split > whole else "dp_shard"


def _unsharded(outcome: Outcome, axis: int, name: str) -> str:
    """Return `dp_replicate` for a data-parallel axis along which no parameter is sharded."""
    if name != "dp_shard":
        return name
    parameters = (op for op in outcome.graph.ops if op.kind == "parameter")
    layouts = (outcome.layout(outcome.graph.representative(op.name)) for op in parameters)
    return name if any(isinstance(layout[axis], Shard) for layout in layouts) else "dp_replicate"
