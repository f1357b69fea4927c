"""Which values are parameters on their way in, and which are gradients on their way out.

Their redistribution waits for nothing and nothing waits for it, so it can run
behind computation: a gather is issued ahead, a gradient's reduction left running.
"""

from __future__ import annotations

from autopar.costs.operators import is_view
from autopar.ir.graph import Graph, Op

_CASTS = frozenset({"aten._to_copy.default", "prims.convert_element_type.default", "aten.clone.default"})
_SUMS = frozenset({"aten.add.Tensor"})


def parameter_like(graph: Graph) -> frozenset[str]:
    """Return the operators that only reshape or cast one parameter or buffer, those included."""
    found: set[str] = set()
    for op in graph.ops:
        passes = is_view(op) or op.target in _CASTS
        if op.kind in {"parameter", "buffer"} or (passes and len(op.refs) == 1 and op.refs[0].op in found):
            found.add(op.name)
    return frozenset(found)


def gradient_like(graph: Graph) -> frozenset[str]:
    """Return the operators whose value becomes parameters' gradients and nothing else, by reshaping, casting, adding."""
    read_by_output: dict[str, set[str]] = {}
    for output in graph.outputs:
        if output.ref is not None:
            read_by_output.setdefault(output.ref.op, set()).add(output.kind)
    found: set[str] = set()
    for op in reversed(graph.ops):
        kinds = read_by_output.get(op.name, set())
        users = graph.users[op.name]
        if op.phase != "backward" or (not kinds and not users) or kinds - {"gradient"}:
            continue
        if all(user in found and _passes(graph.by_name[user]) for user in users):
            found.add(op.name)
    return frozenset(found)


def _passes(op: Op) -> bool:
    return is_view(op) or op.target in _CASTS or op.target in _SUMS
