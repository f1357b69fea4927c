"""Parameters that are the entries of lists: layers that are functions of a `ParameterList`, and no modules."""

from __future__ import annotations

from autopar.ir.graph import Graph, once_per_graph
from autopar.ir.roles import parameter_like


@once_per_graph
def parameter_rows(graph: Graph) -> frozenset[str]:
    """Return the names of parameters whose last part is a number, where such a list has more than one that is read."""
    rows: dict[str, set[str]] = {}
    for names in read_parameters(graph).values():
        for name in names:
            path, _, last = name.rpartition(".")
            if last.isdigit():
                rows.setdefault(path, set()).add(name)
    return frozenset(name for names in rows.values() if len(names) > 1 for name in names)


@once_per_graph
def read_parameters(graph: Graph) -> dict[str, frozenset[str]]:
    """Return the names of the parameters that each computing operator reads, also through views and casts."""
    views = parameter_like(graph)
    behind: dict[str, frozenset[str]] = {}
    found: dict[str, frozenset[str]] = {}
    for op in graph.ops:
        if op.kind == "parameter":
            behind[op.name] = frozenset(graph.aliases.get(op.target, (op.target,)))
            continue
        read = frozenset(name for ref in op.refs for name in behind.get(ref.op, ()))
        if op.name in views:
            behind[op.name] = read
        elif read:
            found[op.name] = read
    return found
