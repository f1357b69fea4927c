"""Splits of parameters, and of their gradients, that the ranks of an axis do not divide: padded shards.

Only what a program starts from and ends with is padded, and what casts it: all else works on even parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Graph, Op
from autopar.ir.placement import Shard, is_valid
from autopar.ir.roles import CASTS, gradient_like, parameter_like
from autopar.ir.strategy import Strategy

_TOLERATED = 1 / 8
"""Share of a dimension up to which padding is as good as none: the first such dimension needs no copies."""


def with_padding(
    graph: Graph, reps: Sequence[Op], size: int, found: Mapping[str, tuple[Strategy, ...]], *, beside_experts: bool
) -> dict[str, tuple[Strategy, ...]]:
    """Return the strategies on an axis of `size` ranks with a padded shard where no dimension of a parameter divides.

    With `beside_experts`, the first dimension of stacked matrices is left to the axis that splits experts.
    """
    ends = gradient_like(graph)
    starts = parameter_like(graph)
    more = dict(found)
    for op in reps:
        meta = op.outputs[0] if op.outputs else None
        casts = op.target in CASTS and (op.name in starts or op.name in ends)
        if meta is None or not (op.kind == "parameter" or casts):
            continue
        first = int(beside_experts and len(meta.shape) > 2)
        shard = padded_shard(meta.shape, size, first)
        if shard is not None:
            more[op.name] = (*found[op.name], Strategy((shard,) * len(op.refs), (shard,)))
    return more


def padded_shard(shape: Sequence[int], size: int, first: int = 0) -> Shard | None:
    """Return how `size` ranks split a tensor of which they divide no dimension; `None` if they do, or none is as long.

    That is the first dimension, from `first` on, to which padding adds little, else the first of all.
    """
    if any(is_valid(shape, (Shard(dim),), (size,)) for dim in range(len(shape))):
        return None
    dims = [dim for dim in range(first, len(shape)) if shape[dim] >= size]
    return Shard(min(dims, key=lambda dim: (-shape[dim] % size > _TOLERATED * shape[dim], dim))) if dims else None
