"""Views by strides, which count places in memory: told by what they show instead, and of tensors in plain order.

    chunks = x.as_strided((b, 3, 16), (32, 8, 1))   # of x [b, 32]: windows of 16 that overlap
becomes
    chunks = x.index_select(1, places).view(b, 3, 16)

A dimension that the view shows as it is, such as the batch, stays one, so that it can be split; what lies between two
of its places in memory is found in plain order. So samples are seen to be independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar._torch import storage_key
from autopar.capture.constants import is_write
from autopar.capture.errors import memory_with_gaps
from autopar.capture.origin import user_line

_ATEN = torch.ops.aten
_STRIDED = frozenset({_ATEN.as_strided.default, _ATEN.as_strided_scatter.default})

Dims = dict[int, tuple[int, int]]
"""Dimensions by their place: how large they are, and how far apart in memory."""


def look_up_windows(graph: fx.GraphModule) -> int:
    """Replace views by strides that nobody writes to, in a graph of Dynamo's, by lookups; return how many."""
    replaced = 0
    for node in list(graph.graph.nodes):
        if node.target not in {"as_strided", torch.as_strided} or not isinstance(node.args[0], fx.Node):
            continue
        value: Any = node.args[0].meta.get("example_value")
        made: Any = node.meta.get("example_value")
        if not (_has_shape(value) and _has_shape(made)) or value.storage_offset() != made.storage_offset():
            continue
        if not _is_dense(value) or _is_written(node, made):
            continue
        kept, rest, places = _kept_dims(value, made)
        if not kept or not all(places):
            continue
        with graph.graph.inserting_before(node):
            found = _looked_up(graph.graph, node.args[0], value, made, kept, rest, places)
        node.replace_all_uses_with(found)
        graph.graph.erase_node(node)
        replaced += 1
    if replaced:
        graph.recompile()
    return replaced


def _kept_dims(value: torch.Tensor, made: torch.Tensor) -> tuple[list[tuple[int, int]], Dims, Dims]:
    """Return which dimensions a view shows as they are, each with its place in the view, and the others of both.

    One is shown as it is if no other of the view's reaches along it. Without it the others are in a memory without it.
    """
    ours = {dim: (size, stride) for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True))}
    theirs = {dim: (size, stride) for dim, (size, stride) in enumerate(zip(made.shape, made.stride(), strict=True))}
    kept: list[tuple[int, int]] = []
    for dim in range(value.dim()):
        size, stride = ours[dim]
        at = next((each for each, shown in theirs.items() if shown == ours[dim]), None)
        if size == 1 or at is None:
            continue
        others = {each: shown for each, shown in theirs.items() if each != at}
        within = sum((count - 1) * step for count, step in others.values() if step < stride)
        beyond = [step for count, step in others.values() if step >= stride and count > 1]
        if within >= stride or any(step % (size * stride) for step in beyond):
            continue
        kept.append((dim, at))
        ours, theirs = _without(ours, dim, size, stride), _without(theirs, at, size, stride)
        # Strides of those that were kept before are of the larger memory, and no longer asked for.
    return kept, ours, theirs


def _without(dims: Dims, dim: int, size: int, stride: int) -> Dims:
    return {
        each: (count, step // size if step >= size * stride else step)
        for each, (count, step) in dims.items()
        if each != dim
    }


def _looked_up(
    graph: fx.Graph,
    source: fx.Node,
    value: torch.Tensor,
    made: torch.Tensor,
    kept: Sequence[tuple[int, int]],
    rest: Dims,
    places: Dims,
) -> fx.Node:
    call = graph.call_method
    order = [dim for dim, _ in kept] + sorted(rest, key=lambda dim: -rest[dim][1])
    sizes = [value.shape[dim] for dim, _ in kept]
    count = math.prod(size for size, _ in rest.values())
    flat = call("reshape", (call("permute", (source, order)), [*sizes, count]))
    shown = list(places)
    at = graph.call_function(torch.arange, (count,), {"device": value.device})
    at = call("as_strided", (at, [places[each][0] for each in shown], [places[each][1] for each in shown]))
    found = call("index_select", (flat, len(sizes), call("reshape", (at, [-1]))))
    found = call("reshape", (found, [*sizes, *(places[each][0] for each in shown)]))
    stands = [at for _, at in kept] + shown
    return call("permute", (found, [stands.index(dim) for dim in range(made.dim())]))


def _has_shape(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _is_dense(value: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its part of memory, each in a place of its own."""
    return value.permute(_outermost_first(value)).is_contiguous()


def _outermost_first(value: torch.Tensor) -> list[int]:
    return sorted(range(value.dim()), key=lambda dim: (value.stride(dim), value.shape[dim]), reverse=True)


def _is_written(node: fx.Node, made: torch.Tensor) -> bool:
    """Return whether something writes to what a view shows, after it was made."""
    late = False
    for each in node.graph.nodes:
        late = late or each is node
        if late and is_write(each) and isinstance(each.args[0], fx.Node):
            written = each.args[0].meta.get("example_value")
            if not isinstance(written, torch.Tensor) or storage_key(written) == storage_key(made):
                return True
    return False


def in_plain_order(joint: fx.GraphModule, name: str) -> int:
    """Let views by strides start from tensors whose memory is in plain order; return how many did not.

    A tensor that a rank gathers is in plain order, whatever it was on one device.

    Raises:
        CaptureError: a view shows what lies between the elements of its tensor.
    """
    changed = 0
    for node in list(joint.graph.nodes):
        value = node.args[0].meta["val"] if node.target in _STRIDED else None
        if value is None or value.is_contiguous():
            continue
        if not _is_dense(value):
            raise memory_with_gaps(name, value.shape, value.stride(), user_line(node.meta.get("stack_trace", "")))
        order = _outermost_first(value)
        with joint.graph.inserting_before(node):
            first = _permuted(joint.graph, node, node.args[0], order)
        node.args = (first, *node.args[1:])
        if node.target is _ATEN.as_strided_scatter.default:
            node.meta["val"] = node.meta["val"].new_empty(first.meta["val"].shape)
            back = [order.index(dim) for dim in range(value.dim())]
            with joint.graph.inserting_after(node):
                last = _permuted(joint.graph, node, node, back)
            node.replace_all_uses_with(last, delete_user_cb=_other_than(last))
        changed += 1
    return changed


def _other_than(kept: fx.Node) -> Any:
    return lambda user: user is not kept


def _permuted(graph: fx.Graph, like: fx.Node, value: fx.Node, order: Sequence[int]) -> fx.Node:
    made = graph.call_function(_ATEN.permute.default, (value, list(order)))
    made.meta = {**like.meta, "val": value.meta["val"].permute(order)}
    return made
