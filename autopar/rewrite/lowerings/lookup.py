"""Reads and writes at places told by index tensors, where the places themselves are split.

read     result = where(place is mine, table[local place], 0)                 a term of the whole
write    part   = part with what is written to places that are mine           this rank's part
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.rewrite.lowerings.places import aten, digits, either, locate, widened
from autopar.rewrite.site import Site

_NOWHERE = -2
"""Padding index of a gradient some of whose rows are another rank's: no row of the table, nor -1, which says "none"."""


def embedding(site: Site) -> fx.Node:
    """Emit a look-up of the rows that this rank holds, zero for the others."""
    weight, indices = site.args[:2]
    held = digits(site, site.strategy.inputs[0], 0, site.metas[0].shape[0])
    missing, local = locate(site, indices, held)
    found = site.call(aten.embedding.default, weight, local)
    return _cleared(site, found, missing, 1)


def embedding_backward(site: Site) -> fx.Node:
    """Emit the gradient of the rows that this rank holds."""
    grad, indices, rows, padding, by_frequency = site.args
    meta, layout = site.op.outputs[0], site.strategy.outputs[0]
    if meta is None or layout is None:
        raise ValueError(f"{site.op.name} makes no tensor")
    missing, local = locate(site, indices, digits(site, layout, 0, meta.shape[0]))
    if padding >= 0:
        missing = either(site, missing, site.call(aten.eq.Scalar, indices, padding))
    if missing is None:
        return site.call(aten.embedding_dense_backward.default, grad, local, rows, -1, by_frequency)
    local = site.call(aten.masked_fill.Scalar, local, missing, _NOWHERE)
    return site.call(aten.embedding_dense_backward.default, grad, local, rows, _NOWHERE, by_frequency)


def index(site: Site) -> fx.Node:
    """Emit `self[indices]` where indexed dimensions of `self` are split."""
    table, indices = site.args[:2]
    missing, local, _ = _located(site, list(indices))
    found = site.call(_target(site), table, local)
    return _cleared(site, found, missing, _after(site))


def index_put(site: Site) -> fx.Node:
    """Emit `self[indices] = values` (or `+=`) on the places that this rank holds."""
    table, indices, values = site.args[:3]
    adds = site.args[3] if len(site.args) > 3 else site.kwargs.get("accumulate", False)
    missing, local, dims = _located(site, list(indices))
    if missing is None:
        return site.call(_target(site), table, local, values, adds)
    if adds:
        hidden = site.call(aten.where.ScalarSelf, widened(site, missing, _after(site)), 0, values)
        return site.call(_target(site), table, local, hidden, True)
    first = dims[0]
    local[first] = _aside(site, local[first], missing, first)
    written = site.call(_target(site), _extended(site, table, first), local, values, False)
    return _trimmed(site, written, first)


def gather(site: Site) -> fx.Node:
    """Emit a gather along a split dimension."""
    table, dim, places = site.args[:3]
    missing, local = _along(site, places, dim)
    return _cleared(site, site.call(aten.gather.default, table, dim, local), missing, 0)


def index_select(site: Site) -> fx.Node:
    """Emit a selection along a split dimension."""
    table, dim, places = site.args
    missing, local = _along(site, places, dim)
    rank = len(site.metas[0].shape)
    return _cleared(site, site.call(aten.index_select.default, table, dim, local), missing, rank - 1 - dim % rank)


def index_add(site: Site) -> fx.Node:
    """Emit an addition at places along a split dimension."""
    table, dim, places, source = site.args
    rank = len(site.metas[0].shape)
    missing, local = _along(site, places, dim)
    hidden = source
    if missing is not None:
        hidden = site.call(aten.where.ScalarSelf, widened(site, missing, rank - 1 - dim % rank), 0, source)
    return site.call(aten.index_add.default, table, dim, local, hidden, **site.kwargs)


def scatter(site: Site) -> fx.Node:
    """Emit a scatter along a split dimension: what is not this rank's goes to a place beside, which is cut off."""
    table, dim, places, *rest = site.args
    dim %= len(site.metas[0].shape)
    missing, local = _along(site, places, dim)
    if missing is None:
        return site.call(_target(site), table, dim, local, *rest, **site.kwargs)
    local = _aside(site, local, missing, dim)
    written = site.call(_target(site), _extended(site, table, dim), dim, local, *rest, **site.kwargs)
    return _trimmed(site, written, dim)


def _target(site: Site) -> Any:
    space, packet, overload = site.op.target.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def _along(site: Site, places: fx.Node, dim: int) -> tuple[fx.Node | None, fx.Node]:
    shape = site.metas[0].shape
    dim %= len(shape)
    return locate(site, places, digits(site, site.strategy.inputs[0], dim, shape[dim]))


def _located(site: Site, indices: list[Any]) -> tuple[fx.Node | None, list[Any], list[int]]:
    """Return which elements are not this rank's, the indices made local, and the split dimensions among the indexed."""
    shape, layout = site.metas[0].shape, site.strategy.inputs[0]
    missing: fx.Node | None = None
    split: list[int] = []
    for dim, places in enumerate(indices):
        held = [] if places is None else digits(site, layout, dim, shape[dim])
        if held:
            # Indexing counts negative places from the end.
            positive = site.call(aten.remainder.Scalar, places, shape[dim])
            other, indices[dim] = locate(site, positive, held)
            missing = either(site, missing, other)
            split.append(dim)
    return missing, indices, split


def _after(site: Site) -> int:
    """Return how many dimensions of what an index reads come after those of the index itself."""
    dims = [dim for dim, places in enumerate(site.args[1]) if places is not None]
    rank = len(site.metas[0].shape)
    at = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    return rank - len(dims) - at


def _cleared(site: Site, value: fx.Node, missing: fx.Node | None, dims: int) -> fx.Node:
    """Return a value with zero where it is not this rank's; `missing` lacks the last `dims` dimensions."""
    if missing is None:
        return value
    return site.call(aten.masked_fill.Scalar, value, widened(site, missing, dims), 0)


def _aside(site: Site, local: fx.Node, missing: fx.Node, dim: int) -> fx.Node:
    """Return local places, those not this rank's moved to one place behind the end of the dimension."""
    return site.call(aten.masked_fill.Scalar, local, missing, site.local_input(0)[dim])


def _extended(site: Site, value: fx.Node, dim: int) -> fx.Node:
    behind = len(site.metas[0].shape) - 1 - dim
    return site.call(aten.constant_pad_nd.default, value, [0, 0] * behind + [0, 1], 0)


def _trimmed(site: Site, value: fx.Node, dim: int) -> fx.Node:
    return site.call(aten.slice.Tensor, value, dim, 0, site.local_input(0)[dim])
