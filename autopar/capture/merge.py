"""Equal views of one value become one node.

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
