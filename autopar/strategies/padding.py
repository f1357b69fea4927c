"""Splits of parameters, and of their gradients, that the ranks of an axis do not divide: padded shards.

Only what a program starts from and ends with is padded, and what casts or transposes it: all else works on even parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Graph, Op
from autopar.ir.placement import Shard, is_valid
from autopar.ir.roles import CASTS, gradient_like, order_of, parameter_like
from autopar.ir.strategy import Strategy

_TOLERATED = 1 / 8
"""Share of a dimension up to which padding is as good as none: the first such dimension needs no copies."""


def with_padding(
    graph: Graph, reps: Sequence[Op], size: int, found: Mapping[str, tuple[Strategy, ...]], *, beside_experts: bool
) -> dict[str, tuple[Strategy, ...]]:
    """Return the strategies on an axis of `size` ranks with a padded shard where no dimension of a parameter divides.

    With `beside_experts`, the first dimension of stacked matrices is left to the axis that splits experts.
    """
    more = dict(found)
    shards: dict[str, Shard] = {}
    for op in reps:
        meta = op.outputs[0] if op.outputs else None
        if meta is None or not may_be_padded(graph, op):
            continue
        of = [graph.representative(ref.op) for ref in op.refs]
        taken = shards.get(of[0]) if of else None
        if taken is None:
            # A gradient is scattered to where its parameter is: of the same shape, if nothing transposes it yet.
            taken = padded_shard(meta.shape, size, int(beside_experts and len(meta.shape) > 2))
            made = taken if order_of(op) is None else None
        else:
            order = order_of(op)
            made = taken if order is None else Shard(order.index(taken.dim))
        if taken is not None and made is not None:
            shards[op.name] = made
            more[op.name] = (*found[op.name], Strategy((taken,) * len(op.refs), (made,)))
    return more


def may_be_padded(graph: Graph, op: Op) -> bool:
    """Return whether an operator makes a parameter or gradient that may be padded."""
    if op.kind == "parameter":
        return True
    moves = len(op.refs) == 1 and (op.target in CASTS or order_of(op) is not None)
    return moves and (op.name in parameter_like(graph) or op.name in gradient_like(graph))


def padded_shard(shape: Sequence[int], size: int, first: int = 0) -> Shard | None:
    """Return how `size` ranks split a tensor of which they divide no dimension; `None` if they do, or none is as long.

    That is the first dimension, from `first` on, to which padding adds little, else the first of all.
    """
    if any(is_valid(shape, (Shard(dim),), (size,)) for dim in range(len(shape))):
        return None
    dims = [dim for dim in range(first, len(shape)) if shape[dim] >= size]
    return Shard(min(dims, key=lambda dim: (-shape[dim] % size > _TOLERATED * shape[dim], dim))) if dims else None
