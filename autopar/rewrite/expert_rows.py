"""Which rows belong to which experts: where the rows of a value that goes to experts' ranks end."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.graph import Graph, Op, Ref
from autopar.ir.placement import Layout, Shard
from autopar.ir.plan import Decisions
from autopar.ir.roles import ENDS_OF_EXPERTS
from autopar.ir.strategy import MeshStrategy
from autopar.rewrite.errors import RewriteError


def ends_of_rows(graph: Graph, decisions: Decisions) -> dict[Ref, Ref]:
    """Return, of each value whose rows an operator reads or makes on their experts' ranks, where those rows end.

    Operators between products treat rows one by one, so that all their values have the same ones.

    Raises:
        RewriteError: rows that different experts take meet.
    """
    above: dict[Ref, Ref] = {}

    def root(ref: Ref) -> Ref:
        while (found := above.get(ref, ref)) != ref:
            ref = found
        return ref

    ends: list[tuple[Ref, Ref]] = []
    for op in graph.ops:
        if op.kind != "call":
            continue
        strategy = decisions.operators[graph.representative(op.name)].strategy
        routed = any(each.lowering == "routed" for each in strategy.axes)
        values = list(_on_experts_ranks(op, strategy, routed=routed))
        for value in values[1:]:
            above[root(value)] = root(values[0])
        if routed:
            ends.append((values[0], op.refs[ENDS_OF_EXPERTS]))
    found: dict[Ref, Ref] = {}
    for value, end in ends:
        if found.setdefault(root(value), end) != end:
            raise RewriteError(f"{graph.by_name[value.op].where} reads rows that two routings give to experts")
    return {ref: found[root(ref)] for ref in {*above, *above.values(), *found} if root(ref) in found}


def has_experts_rows(strategy: MeshStrategy) -> bool:
    """Return whether an operator makes rows of experts' ranks: how many, only the data tell."""
    return any(layout is not None and _is_there(layout) for layout in strategy.outputs)


def _on_experts_ranks(op: Op, strategy: MeshStrategy, *, routed: bool) -> Iterator[Ref]:
    for slot, (ref, layout) in enumerate(zip(op.refs, strategy.inputs, strict=True)):
        if _is_there(layout) and not (routed and slot == ENDS_OF_EXPERTS):
            yield ref
    for index, made in enumerate(strategy.outputs):
        if made is not None and _is_there(made):
            yield Ref(op.name, index)


def _is_there(layout: Layout) -> bool:
    return any(isinstance(each, Shard) and each.rows == "expert" for each in layout)
