"""Which random values all micro-batches of a step share, as they are drawn once on a single device.

What is whole in every micro-batch, and of which none takes its own rows: dropout of weights, one number for all
samples. Of a draw with a row for each sample that micro-batches cut, each takes the first rows of one of its own:
drawn alike, all of them would have the same noise.
"""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.ir.placement import Layout, Shard
from autopar.ir.plan import Decisions


def drawn_once(graph: Graph, decisions: Decisions) -> frozenset[str]:
    """Return the names of operators whose outputs are whole in time and cut by no reader, nor what is made of them.

    None where the decisions' mesh has no axis in time.
    """
    in_time = [i for i, axis in enumerate(decisions.mesh.axes) if axis.in_time]
    if not in_time:
        return frozenset()

    def is_split(layout: Layout | None) -> bool:
        return layout is not None and any(isinstance(layout[i], Shard) for i in in_time)

    cut: set[str] = set()
    whole: set[str] = set()
    for op in reversed(graph.ops):
        if op.kind != "call":
            continue
        strategy = decisions.operators[graph.representative(op.name)].strategy
        if not any(map(is_split, strategy.outputs)):
            whole.add(op.name)
        for ref, layout in zip(op.refs, strategy.inputs, strict=True):
            if is_split(layout) or (op.name in cut and op.name in whole):
                cut.add(ref.op)
    return frozenset(whole - cut)
