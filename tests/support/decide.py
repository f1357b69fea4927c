"""Decisions for tests, without a search: everything replicated, parameters sharded at rest if asked."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph, Op
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.placement import Layout, Placement, Replicate, Shard, is_valid, nest
from autopar.ir.plan import Decisions, Gather, OperatorDecision, ParameterDecision
from autopar.ir.strategy import MeshStrategy, Strategy


def mesh_of(**sizes: int) -> Mesh:
    """Return a mesh with these axes, major first."""
    return Mesh(tuple(Axis(name, size) for name, size in sizes.items()))


def strategy(axes: tuple[Strategy, ...], sizes: tuple[int, ...]) -> MeshStrategy:
    """Return a strategy an axis as one for the mesh."""
    ins = tuple(nest(tuple(s.inputs[i] for s in axes), sizes) for i in range(len(axes[0].inputs))) if axes else ()
    outs = tuple(nest(tuple(s.outputs[i] for s in axes), sizes) for i in range(len(axes[0].outputs))) if axes else ()
    return MeshStrategy(axes, ins, outs)


def whole(op: Op, axes: int) -> Strategy:
    """Return the strategy that replicates everything."""
    return Strategy((Replicate(),) * len(op.refs), tuple(Replicate() if m else None for m in op.outputs))


def decide(
    graph: Graph,
    mesh: Mesh,
    *,
    at_rest: Mapping[str, tuple[Placement, ...]] | None = None,
    operators: Mapping[str, tuple[Strategy, ...]] | None = None,
    outputs: Mapping[str, Layout] | None = None,
    gather: Gather = "none",
    zero: bool = False,
) -> Decisions:
    """Return decisions that replicate all but what is named; `zero` shards parameters at rest wherever they divide."""
    sizes, axes = mesh.sizes, len(mesh.axes)
    parameters: dict[str, ParameterDecision] = {}
    decided: dict[str, OperatorDecision] = {}
    for op in graph.ops:
        if op.kind in {"parameter", "buffer"}:
            layout: Layout = (Replicate(),) * axes
            if at_rest and op.target in at_rest:
                layout = nest(at_rest[op.target], sizes)
            elif zero and op.kind == "parameter":
                shape = op.outputs[0].shape
                wish = nest((Shard(0),) * axes, sizes)
                layout = wish if is_valid(shape, wish, sizes) else layout
            for name in graph.aliases.get(op.target, (op.target,)):
                parameters[name] = ParameterDecision(placements=layout, gather=gather)
            found = MeshStrategy(tuple(Strategy((), (p,)) for p in layout), (), (layout,))
        elif operators and op.name in operators:
            found = strategy(operators[op.name], sizes)
        else:
            replicated: Layout = (Replicate(),) * axes
            found = MeshStrategy(
                (whole(op, axes),) * axes,
                (replicated,) * len(op.refs),
                tuple(replicated if m else None for m in op.outputs),
            )
        decided[op.name] = OperatorDecision(target=op.target, strategy=found)
    results = {o.name: (outputs or {}).get(o.name, (Replicate(),) * axes) for o in graph.outputs if o.kind == "output"}
    return Decisions(
        degrees={axis.name: axis.size for axis in mesh.axes},
        mesh=mesh,
        parameters=parameters,
        operators=decided,
        outputs=results,
        collectives=(),
    )
