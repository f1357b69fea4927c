"""One operator of the program on local shapes: itself, or the lowering that its strategy names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import OWN, within
from autopar.ir.placement import Layout, local_shape
from autopar.ir.strategy import MeshStrategy
from autopar.ir.tensor import TensorMeta
from autopar.rewrite.expert_ops import EXPERTS
from autopar.rewrite.expert_rows import has_experts_rows
from autopar.rewrite.localise import localise
from autopar.rewrite.lowerings import lowering_of
from autopar.rewrite.site import Site

_ATEN = torch.ops.aten
_RESHAPE = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default})
"""Views of whole tensors that local strides may forbid."""

_CONTIGUOUS: dict[Any, int] = {
    _ATEN.view_as_complex.default: 0,
    _ATEN.view.dtype: 0,
    _ATEN.nll_loss2d_backward.default: 1,
}
"""Which argument kernels need as it lay in the whole tensor, contiguous: views of the last dimension's elements
together, and the scores whose gradient is allocated alike."""

_FACTORED = frozenset({_ATEN._linalg_det.default, _ATEN._linalg_slogdet.default, _ATEN._linalg_solve_ex.default})
"""Operators that keep a matrix's factors for backward: of a contiguous one those of its transpose, which the captured
backward knows and no shape tells."""

_PLACED = frozenset({_ATEN.as_strided.default, _ATEN.as_strided_scatter.default})
"""Operators that count places in memory."""


def emit(site: Site, node: fx.Node) -> Any:
    """Append an operator to the site's graph; return its node, or the tuple of nodes that are its outputs.

    `site` holds the arguments with the sizes of the whole tensors, `node` is the operator in the captured graph.
    Without mesh axes the operator stays as it was.
    """
    if own := site.axes(OWN):
        return _on_own_rows(site, node, own[0])
    if not site.mesh.axes:
        return site.graph.create_node(node.op, node.target, site.args, site.kwargs, name=node.name)
    args, kwargs = localise(site.op, site.args, site.kwargs, site.strategy, site.mesh)
    at = _CONTIGUOUS.get(node.target)
    if at is not None:
        args = (*args[:at], site.call(_ATEN.contiguous.default, args[at]), *args[at + 1 :])
    if node.target in _FACTORED | _PLACED:
        args = (_as_captured(site, args[0], node), *args[1:])
    if node.target is _ATEN.slice_backward.default and has_experts_rows(site.strategy):
        return site.call(EXPERTS.slice_backward.default, *args)
    if any(site.tags):
        return lowering_of(site.op.target)(replace(site, args=args, kwargs=kwargs))
    target = _ATEN.reshape.default if node.target in _RESHAPE else node.target
    return site.graph.create_node(node.op, target, args, kwargs, name=node.name)


def _as_captured(site: Site, value: fx.Node, node: fx.Node) -> fx.Node:
    """Return the first argument of an operator contiguous if it was so when captured: a gathered one may not be."""
    seen: torch.Tensor = node.all_input_nodes[0].meta["val"]
    if seen.is_contiguous():
        return site.call(_ATEN.contiguous.default, value)
    if node.target in _PLACED:
        return value
    across = site.call(_ATEN.contiguous.default, site.call(_ATEN.transpose.int, value, -2, -1))
    return site.call(_ATEN.transpose.int, across, -2, -1)


def _on_own_rows(site: Site, node: fx.Node, place: int) -> Any:
    """Append an operator as if the part of the batch along an axis were all of it: split along the others alone."""
    axis, inner = site.mesh.axes[place], Mesh((*site.mesh.axes[:place], *site.mesh.axes[place + 1 :]))
    mine, strategy = within(site.strategy, axis.size, place)
    inputs = tuple((each,) for each in mine.inputs)
    outputs = tuple(None if each is None else (each,) for each in mine.outputs)
    args, kwargs = localise(site.op, site.args, site.kwargs, MeshStrategy((mine,), inputs, outputs), Mesh((axis,)))
    made = tuple(
        None if meta is None or layout is None else _part(meta, layout, axis.size)
        for meta, layout in zip(site.op.outputs, outputs, strict=True)
    )
    before = next(iter(reversed(site.graph.nodes)), None)
    small = replace(
        site,
        op=replace(site.op, outputs=made),
        args=args,
        kwargs=kwargs,
        strategy=strategy,
        mesh=inner,
        coordinate=(*site.coordinate[:place], *site.coordinate[place + 1 :]),
        metas=tuple(_part(meta, layout, axis.size) for meta, layout in zip(site.metas, inputs, strict=True)),
    )
    result = emit(small, node)
    for each in reversed(site.graph.nodes):
        if each is before or not axis.in_time:
            break
        each.meta["own_rows"] = True
    return result


def _part(meta: TensorMeta, layout: Layout, count: int) -> TensorMeta:
    return replace(meta, shape=local_shape(meta.shape, layout, (count,)))
