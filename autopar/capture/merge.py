"""Equal views of one value become one node, and views that change nothing none.

Each of several linear layers that read the same activation flattens it anew. Apart,
each of those views would be redistributed for itself; as one, its readers share.
"""

from __future__ import annotations

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
    """Remove each `as_strided` that describes its input as it is, and each scatter through such one; return how many.

    Pooling to one place makes them, to say that dimensions of size 1 may have strides of channels-last memory. Where
    elements lie in memory says nothing of what they are, so in general `as_strided` has no rule.
    """
    dropped = 0
    for node in list(joint.graph.nodes):
        if node.target not in _STRIDED:
            continue
        *given, size, stride, offset = (*node.args, None)[: _STRIDED[node.target]]
        value = given[0].meta["val"]
        strides = zip(value.shape, value.stride(), stride, strict=False)
        same = tuple(size) == tuple(value.shape) and all(a == b for n, a, b in strides if n > 1)
        if same and not node.kwargs and offset in {None, value.storage_offset()}:
            node.replace_all_uses_with(given[-1])  # what is viewed, or what is written over all of it
            joint.graph.erase_node(node)
            dropped += 1
    return dropped


def merge_equal_views(joint: fx.GraphModule) -> int:
    """Give the users of a view that an earlier node of the same phase made already that node; return how many."""
    seen: dict[object, fx.Node] = {}
    merged = 0
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or node.target not in _VIEWS or node.kwargs:
            continue
        key = (node.target, str(node.args), node.meta.get("partitioner_tag"))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            joint.graph.erase_node(node)
            merged += 1
    return merged
