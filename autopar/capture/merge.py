"""Equal views and casts of one value become one node, and views that change nothing none.

Each of several linear layers that read the same activation flattens it anew, and under autocast casts it anew. Apart,
each of those would be redistributed for itself, and each cast be saved for backward; as one, their readers share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import fx

_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.transpose.int, _aten.permute.default,
        _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default, _aten.detach.default, _aten.alias.default,
    }
)  # fmt: skip

_STRIDED = {_aten.as_strided.default: 4, _aten.as_strided_scatter.default: 5}
"""Operators on strides, and the number of their arguments."""


def drop_idle_strides(joint: fx.GraphModule) -> int:
    """Replace each `as_strided` and its scatter that say nothing of where elements lie; return how many.

    One that describes its input as it is, and a scatter through such one, are left out; between dense tensors with
    their elements in plain order both are views. Pooling to one place makes them, to say that dimensions of size 1 may
    have strides of channels-last memory, and its backward writes so into zeros. Where elements lie in memory says
    nothing of what they are, so in general `as_strided` has no rule.
    """
    dropped = 0
    for node in list(joint.graph.nodes):
        if node.target is _aten.copy.default and _is_whole(*node.args[:2]) and _lies_as(node, node.args[1]):
            node.replace_all_uses_with(node.args[1])
            dropped += 1
        if node.target not in _STRIDED:
            continue
        *given, size, stride, offset = (*node.args, None)[: _STRIDED[node.target]]
        value = given[0].meta["val"]
        if node.kwargs or offset not in {None, value.storage_offset()}:
            continue
        written = given[-1]  # what is viewed, or what is written over all of it
        if tuple(size) == tuple(value.shape) and _same_strides(size, value.stride(), stride):
            node.replace_all_uses_with(written)
            dropped += 1
        elif value.is_contiguous() and math.prod(size) == value.numel() and _same_strides(size, _plain(size), stride):
            node.target, node.args = _aten.view.default, (written, list(node.meta["val"].shape))
            dropped += 1
    if dropped:
        joint.graph.eliminate_dead_code()
    return dropped


def _lies_as(made: fx.Node, source: fx.Node) -> bool:
    """Return whether a copy lies in memory as its source does: views of the one are views of the other."""
    value = made.meta["val"]
    return _same_strides(value.shape, value.stride(), source.meta["val"].stride())


def _is_whole(into: fx.Node, source: fx.Node) -> bool:
    """Return whether a copy gives its source as it is."""
    a, b = into.meta["val"], source.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype)


def _plain(size: Sequence[int]) -> list[int]:
    """Return the strides of a dense tensor whose last dimension is innermost in memory."""
    return [math.prod(size[dim + 1 :]) for dim in range(len(size))]


def _same_strides(size: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    return all(x == y for n, x, y in zip(size, a, b, strict=True) if n > 1)


def merge_equal(joint: fx.GraphModule, layer_of: Callable[[fx.Node], str]) -> int:
    """Give the users of a view or cast that an earlier node of the same phase made already that node; return how many.

    Casts are merged inside a layer, by `layer_of`: equal layers stay equal, and what one of them makes need not live,
    or travel to another pipeline stage, for all that follow.
    """
    seen: dict[object, fx.Node] = {}
    merged = 0
    for node in list(joint.graph.nodes):
        is_cast = node.target is _aten._to_copy.default
        if node.op != "call_function" or not (is_cast or (node.target in _VIEWS and not node.kwargs)):
            continue
        layer = layer_of(node) if is_cast else ""
        key = (node.target, str(node.args), str(node.kwargs), node.meta.get("partitioner_tag"), layer)
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            joint.graph.erase_node(node)
            merged += 1
    return merged
