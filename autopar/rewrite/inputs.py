"""Where a rank's own part of the batch belongs, for loaders that split it themselves."""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.ir.placement import Layout, Replicate, Shard, is_valid, nest
from autopar.ir.plan import Decisions


def split_inputs(graph: Graph, decisions: Decisions) -> dict[str, Layout]:
    """Return the layout of each input that ranks bring in parts: split along the batch over the axes that split it.

    An axis splits the batch if some operator reads an input in pieces of its first dimension along it. Along the
    other axes ranks bring the same part.
    """
    shapes = {op.name: op.outputs[0].shape for op in graph.ops if op.kind == "input" and op.outputs[0] is not None}
    batched = {name: shape for name, shape in shapes.items() if shape[:1] == (graph.batch_size,)}
    axes: set[int] = set()
    for op in graph.ops:
        if op.kind != "call":
            continue
        needed = decisions.operators[graph.representative(op.name)].strategy.inputs
        for ref, layout in zip(op.refs, needed, strict=True):
            if ref.op in batched:
                axes |= {axis for axis, p in enumerate(layout) if isinstance(p, Shard) and p.dim == 0}
    sizes = decisions.mesh.sizes
    layout = nest(tuple(Shard(0) if axis in axes else Replicate() for axis in range(len(sizes))), sizes)
    return {name: layout for name, shape in batched.items() if is_valid(shape, layout, sizes)}
