"""Tokens that go to the ranks of their experts and come back: what an expert-parallel mixture does.

    own rows, sorted -> all_to_all -> [ grouped_mm -> silu, mul -> grouped_mm ] -> all_to_all -> own rows -> put back

Each rank sorts its own tokens (`own_samples`), sends each to the rank of its expert, and gets back what that made of
it. On its way between two products a row may be treated there, as long as each is treated by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Graph, Op, Ref
from autopar.ir.microbatches import OWN
from autopar.ir.placement import Partial, Placement, Replicate, Shard, is_own, is_valid
from autopar.ir.roles import ENDS_OF_EXPERTS
from autopar.ir.strategy import Strategy
from autopar.strategies.moe import RULES as GROUPED
from autopar.strategies.pointwise import is_pointwise

_ONE_BY_ONE = frozenset({"prims.convert_element_type.default"}) | {
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "unsqueeze.default", "permute.default",
        "transpose.int", "t.default", "clone.default", "detach.default", "alias.default", "_to_copy.default",
        "slice.Tensor", "select.int", "split.Tensor", "split_with_sizes.default", "cat.default",
        "slice_backward.default", "index.Tensor", "index_put.default", "sum.dim_IntList", "mean.dim",
    )
}  # fmt: skip
"""Operators besides those on elements that can treat rows of whatever number: no argument tells how many there are."""


def routed(
    graph: Graph, size: int, own: Mapping[str, tuple[Strategy, ...]], orders: Mapping[Ref, str]
) -> dict[str, tuple[Strategy, ...]]:
    """Return the strategies `own` of rows in their rank's order, and those on the ranks of the rows' experts.

    `orders` says what sorted a value. Products split their experts, so that none is left that reads all of them.
    """
    taken = _taken(graph, size, own, orders)
    if not taken:
        return {}
    made: dict[str, tuple[Strategy, ...]] = {}
    for rep, options in own.items():
        ops = graph.instances[rep]
        there = _there(ops[0], options[-1])
        if there is not None and all(_are_taken(op, options[-1], orders, taken) for op in ops):
            made[rep] = (there,) if _is_product(ops[0]) else (*options, there)
        elif not _is_product(ops[0]):
            made[rep] = options
    return made


def _taken(
    graph: Graph, size: int, own: Mapping[str, tuple[Strategy, ...]], orders: Mapping[Ref, str]
) -> frozenset[str]:
    """Return the sorts by whose order experts take rows, of which each rank has as many."""
    found: set[str] = set()
    for rep in own:
        for op in graph.instances[rep]:
            if _is_product(op):
                ends = graph.meta(op.refs[ENDS_OF_EXPERTS])
                if not is_valid(ends.shape, (Shard(0),), (size,)):
                    return frozenset()
                found.add(orders.get(op.refs[0], ""))
    return frozenset(found - {""})


def _is_product(op: Op) -> bool:
    return op.target in GROUPED


def _are_taken(op: Op, mine: Strategy, orders: Mapping[Ref, str], taken: frozenset[str]) -> bool:
    """Return whether the rows that an operator reads are some experts', the same ones."""
    read = {
        orders.get(ref, "") for ref, at in zip(op.refs, mine.inputs, strict=True) if at != Partial("own") and is_own(at)
    }
    return len(read) == 1 and read <= taken


def _there(op: Op, mine: Strategy) -> Strategy | None:
    """Return an operator's own strategy on the rows that came to experts' ranks, `None` where there is none."""
    if _is_product(op):
        return _product(mine) if mine.lowering == OWN else None
    if not (op.target in _ONE_BY_ONE or is_pointwise(op.target)) or mine.lowering or mine.inner:
        return None
    inputs = tuple(map(_sent, mine.inputs))
    outputs = tuple(None if each is None else _sent(each) for each in mine.outputs)
    if None in inputs or any(each is None for each in outputs):
        return None
    return Strategy(tuple(p for p in inputs if p is not None), outputs)


def _sent(placement: Placement) -> Placement | None:
    """Return where an operator on experts' ranks has what it had in its rank's order; `None`: it cannot have it."""
    if isinstance(placement, Shard):
        return replace(placement, rows="expert") if placement.rows == "own" else None
    return placement if placement in {Replicate(), Partial()} else None


def _product(mine: Strategy) -> Strategy:
    """Return that of a product: its experts split, and the gradient of these, rows sent."""
    split = Shard(0)

    def at(placement: Placement) -> Placement:
        if isinstance(placement, Shard):
            return replace(placement, rows="expert")
        return Shard(0, rows="expert") if placement == Partial("own") else split

    return Strategy(tuple(map(at, mine.inputs)), tuple(None if p is None else at(p) for p in mine.outputs), "routed")
