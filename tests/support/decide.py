"""Decisions for tests, without a search: everything replicated, drawn at random, or what moves least."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from autopar.ir.graph import Graph, Op, Ref
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.placement import Layout, Placement, Replicate, Shard, is_valid, local_shape, nest
from autopar.ir.plan import Decisions, Gather, OperatorDecision, ParameterDecision, Reduce
from autopar.ir.reshard import is_reachable, route
from autopar.ir.strategy import MeshStrategy, Strategy
from autopar.strategies.axis import axis_strategies
from autopar.strategies.compose import AxisSpec, compose


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


def drawn(
    graph: Graph,
    mesh: Mesh,
    seed: int,
    *,
    gather: Gather = "per_phase",
    reduce: Reduce = "step",
    greedy: bool = False,
    lowered: bool = True,
) -> Decisions:
    """Return decisions drawn at random among all strategies that the rules admit; `greedy`: those that move least.

    Equal layers share decisions, as in a plan. Random decisions are far from good ones, which is
    the point: every operator meets every layout.
    """
    rng = random.Random(seed)
    sizes = mesh.sizes
    choices = compose(graph, [AxisSpec(axis.size) for axis in mesh.axes], axis_strategies)
    decided: dict[str, OperatorDecision] = {}
    holds: dict[Ref, Layout | None] = {}
    for op in graph.ops:
        rep = graph.representative(op.name)
        if rep not in decided:
            have = [holds.get(ref) for ref in op.refs]
            options = [
                s
                for s in choices.of[rep]
                if all(made is None or is_reachable(made, want) for made, want in zip(have, s.inputs, strict=True))
                and (lowered or not any(axis.lowering for axis in s.axes))
            ]
            if not options:
                raise ValueError(f"no strategy of {op.where} can be reached from {have}")
            if greedy:
                order = rng.sample(range(len(options)), len(options))
                chosen = options[min(order, key=lambda i: _moved(graph, op, options[i], have, sizes))]
            else:
                chosen = rng.choice(options)
            decided[rep] = OperatorDecision(target=op.target, strategy=chosen)
        for index, layout in enumerate(decided[rep].strategy.outputs):
            holds[Ref(op.name, index)] = layout
    parameters = {
        name: ParameterDecision(placements=_made(decided, graph, op), gather=gather, reduce=reduce)
        for op in graph.ops
        if op.kind in {"parameter", "buffer"}
        for name in graph.aliases.get(op.target, (op.target,))
    }
    outputs: dict[str, Layout] = {}
    tangents = {op.target: _made(decided, graph, op) for op in graph.ops if op.kind == "tangent"}
    for output in graph.outputs:
        if output.kind == "output":
            outputs[output.name] = tangents.get(output.name, (Replicate(),) * len(mesh.axes))
    return Decisions(
        degrees={axis.name: axis.size for axis in mesh.axes},
        mesh=mesh,
        parameters=parameters,
        operators=decided,
        outputs=outputs,
        collectives=(),
    )


def _made(decided: Mapping[str, OperatorDecision], graph: Graph, op: Op) -> Layout:
    layout = decided[graph.representative(op.name)].strategy.outputs[0]
    assert layout is not None
    return layout


def _moved(graph: Graph, op: Op, strategy: MeshStrategy, have: list[Layout | None], sizes: tuple[int, ...]) -> float:
    moved = 0.0
    for ref, layout, want in zip(op.refs, have, strategy.inputs, strict=True):
        if layout is not None and layout != want:
            meta = graph.meta(ref)
            steps = route(layout, want, meta.shape, sizes)
            moved += sum(s.message_numel(meta.shape, sizes) for s in steps if s.communicates) * meta.item_bytes
    held = sum(
        math.prod(local_shape(meta.shape, layout, sizes)) * meta.item_bytes
        for meta, layout in zip(op.outputs, strategy.outputs, strict=True)
        if meta is not None and layout is not None
    )
    return moved + held
