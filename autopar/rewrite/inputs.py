"""Where a rank's own part of the batch belongs, for loaders that split it themselves."""

from __future__ import annotations

from collections.abc import Collection

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Replicate, Shard, is_valid, nest
from autopar.ir.plan import Decisions


def batch_axes(graph: Graph, decisions: Decisions) -> tuple[str, ...]:
    """Return the mesh axes that split the batch: some operator reads an input in pieces of its first dimension there.

    Ranks that differ along these axes bring different parts, those that differ along others the same.
    """
    batched = _batched(graph)
    axes: set[int] = set()
    for op in graph.ops:
        if op.kind != "call":
            continue
        needed = decisions.operators[graph.representative(op.name)].strategy.inputs
        for ref, layout in zip(op.refs, needed, strict=True):
            if ref.op in batched:
                axes |= {axis for axis, p in enumerate(layout) if isinstance(p, Shard) and p.dim == 0}
    return tuple(axis.name for place, axis in enumerate(decisions.mesh.axes) if place in axes)


def split_inputs(graph: Graph, mesh: Mesh, axes: Collection[str]) -> dict[str, Layout]:
    """Return the layout of each input that ranks bring in parts: those with a batch dimension, split along `axes`."""
    layout = batch_layout(mesh, axes)
    return {name: layout for name, shape in _batched(graph).items() if is_valid(shape, layout, mesh.sizes)}


def batch_layout(mesh: Mesh, axes: Collection[str]) -> Layout:
    """Return the layout in which dimension 0 is split along `axes`, the outer ones further out."""
    plain = tuple(Shard(0) if axis.name in axes else Replicate() for axis in mesh.axes)
    return nest(plain, mesh.sizes)


def _batched(graph: Graph) -> dict[str, tuple[int, ...]]:
    shapes = {op.name: op.outputs[0].shape for op in graph.ops if op.kind == "input" and op.outputs[0] is not None}
    return {name: shape for name, shape in shapes.items() if shape[:1] == (graph.batch_size,)}
