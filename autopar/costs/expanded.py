"""How much of an index is in memory, where rows share theirs.

    index [b, k, 1] → expand [b, k, e] → scatter_add(rows, 1, ., values)

A kernel that goes by such an index finds the same number for all elements of a row: it reads it once from memory. In
64 bits an element it would be four times the row in bfloat16.
"""

from __future__ import annotations

from autopar.ir.graph import Graph, once_per_graph
from autopar.ir.roles import is_view

Shares = tuple[float, ...]
"""Of each tensor that an operator reads: distinct elements in memory over elements."""

_EXPAND = "aten.expand.default"


@once_per_graph
def index_shares(graph: Graph) -> dict[str, Shares]:
    """Return the shares of operators that read an expanded index."""
    share: dict[str, float] = {}
    found: dict[str, Shares] = {}
    for op in graph.ops:
        if op.kind != "call":
            continue
        if not is_view(op):
            shares = tuple(share.get(ref.op, 1.0) for ref in op.refs)
            if any(each < 1.0 for each in shares):
                found[op.name] = shares
            continue
        meta = op.outputs[0]
        if meta is None or meta.is_continuous or len(op.refs) != 1:
            continue
        before = share.get(op.refs[0].op, 1.0)
        if op.target == _EXPAND:
            before *= graph.meta(op.refs[0]).numel / max(meta.numel, 1)
        if before < 1.0:
            share[op.name] = before
    return found
