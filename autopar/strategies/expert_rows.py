"""Tokens between two products with experts that are split over ranks: each row is right on its expert's rank alone.

    x -> [ grouped_mm -> silu, mul -> grouped_mm ] -> sum over the ranks

Every rank has all tokens there, multiplies those of its experts, and makes of the others whatever it makes: each row is
used by the next product on the rank of its expert alone. Summing them in between would send results of an expert's
width, twice a layer, for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autopar.ir.graph import Graph, Op
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.strategy import Strategy

_Value = tuple[str, int]

EXPERT = Partial("expert")

_ROW_BY_ROW = frozenset({"", "view", "scale"})
"""Lowerings of operators that treat each row by itself: what they do on some of the rows, they do on all of them."""


def on_rows_of_experts(
    graph: Graph, found: Mapping[str, tuple[Strategy, ...]], products: Mapping[str, Mapping[int, int]]
) -> dict[str, tuple[Strategy, ...]]:
    """Return what more representative operators may do along an axis of experts, on rows that have an expert's rank.

    `found` are all strategies along it; `products` are the slots of each product that are tokens in order of their
    experts, and in which dimension of each of these they are.
    """
    rows = _rows(graph, found, products)
    wanted = _wanted(graph, rows, products)
    more: dict[str, tuple[Strategy, ...]] = {}
    for rep, (op, *_) in graph.instances.items():
        reads = [(graph.representative(ref.op), ref.index) for ref in op.refs]
        if op.name in products:
            more[rep] = tuple(_of_product(rep, op, found[rep], reads, wanted, products[op.name]))
        elif any((rep, index) in wanted for index in range(len(op.outputs))):
            mine = _row_by_row(found[rep], [rows.get(each) for each in reads])
            more[rep] = () if mine is None else (_marked(mine, [each in rows for each in reads]),)
    return {rep: each for rep, each in more.items() if each}


def _rows(
    graph: Graph, found: Mapping[str, tuple[Strategy, ...]], products: Mapping[str, Mapping[int, int]]
) -> dict[_Value, int]:
    """Return which dimension is tokens of each value that may be right on its experts' ranks alone."""
    rows: dict[_Value, int] = {}
    for rep, (op, *_) in graph.instances.items():
        if op.name in products:
            if any(each.lowering == "experts" and each.outputs[0] == Partial() for each in found[rep]):
                rows[rep, 0] = 0
            continue
        dims = [rows.get((graph.representative(ref.op), ref.index)) for ref in op.refs]
        mine = _row_by_row(found[rep], dims) if op.kind == "call" and any(d is not None for d in dims) else None
        for index, placement in enumerate(mine.outputs if mine is not None else ()):
            if isinstance(placement, Shard):
                rows[rep, index] = placement.dim
    return rows


def _wanted(graph: Graph, rows: Mapping[_Value, int], products: Mapping[str, Mapping[int, int]]) -> frozenset[_Value]:
    """Return which of these come to a product, of whose tokens it is."""
    wanted: set[_Value] = set()
    for op in reversed(graph.ops):
        rep = graph.representative(op.name)
        slots = products.get(rep) or products.get(op.name)
        passes = any((rep, index) in wanted for index in range(len(op.outputs))) and slots is None
        for slot, ref in enumerate(op.refs):
            value = graph.representative(ref.op), ref.index
            if value in rows and (passes or (slots is not None and slots.get(slot) == rows[value])):
                wanted.add(value)
    return frozenset(wanted)


def _row_by_row(options: Sequence[Strategy], dims: Sequence[int | None]) -> Strategy | None:
    """Return a strategy that shows that an operator treats the rows of these dimensions by themselves; `None`: none."""
    for each in options:
        if each.lowering not in _ROW_BY_ROW or each.inner or not all(isinstance(p, Shard) for p in each.outputs):
            continue
        pairs = zip(each.inputs, dims, strict=True)
        if all(placement == Shard(dim) if dim is not None else True for placement, dim in pairs) and any(
            dim is not None for dim in dims
        ):
            return each
    return None


def _marked(mine: Strategy, of_experts: Sequence[bool]) -> Strategy:
    inputs: tuple[Placement, ...] = tuple(EXPERT if each else Replicate() for each in of_experts)
    return Strategy(inputs, tuple(None if each is None else EXPERT for each in mine.outputs))


def _of_product(
    rep: str,
    op: Op,
    options: Sequence[Strategy],
    reads: Sequence[_Value],
    wanted: frozenset[_Value],
    tokens: Mapping[int, int],
) -> list[Strategy]:
    """Return the strategies of a product that splits experts, reading or making rows of experts' ranks."""
    made = []
    for each in options:
        if each.lowering != "experts":
            continue
        can_read = [slot for slot in tokens if reads[slot] in wanted and each.inputs[slot] == Replicate()]
        can_make = each.outputs[0] == Partial() and (rep, 0) in wanted
        for count in range(len(can_read) + 1):
            for read in itertools.combinations(can_read, count):
                for makes in (False, True)[: 1 + can_make]:
                    if read or makes:
                        inputs = tuple(EXPERT if slot in read else p for slot, p in enumerate(each.inputs))
                        outputs = (EXPERT, *each.outputs[1:]) if makes else each.outputs
                        made.append(Strategy(inputs, outputs, each.lowering, each.inner))
    return made
