"""Bytes that collectives copy on a device, because blocks lie elsewhere in a tensor than in what travels.

What travels is cut along the first dimension of a contiguous buffer (`rewrite.steps`): a shard of another dimension is
brought together before it is scattered and apart behind its gather, but where only one row lies before that dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op
from autopar.ir.placement import Layout, Shard, goes_to_experts, is_own, local_outer, local_runs, local_shape, padding
from autopar.ir.reshard import Step
from autopar.ir.roles import order_of

Order = tuple[int, ...]
"""The place in memory of each dimension of a transposed value; empty where they lie in order."""


def memory_order(graph: Graph, op: Op) -> Order:
    """Return where the dimensions of an operator's value lie in memory, as far as it transposes another's."""
    found: Order = ()
    while (order := order_of(op)) is not None:
        found = tuple(order[dim] for dim in found or range(len(order)))
        op = graph.by_name[op.refs[0].op]
    return () if found == tuple(range(len(found))) else found


@dataclass(frozen=True, slots=True)
class Packing:
    """Elements that a step sends, and those that it copies on each rank before and after that."""

    moved: int
    """The message: `Step.message_numel`."""

    together: int = 0
    """Into the buffer that is sent."""

    apart: int = 0
    """From the buffer that came."""

    @property
    def numel(self) -> int:
        """Return all that are copied."""
        return self.together + self.apart


def packing(step: Step, shape: Sequence[int], sizes: Sequence[int], order: Order) -> Packing:
    """Return what a collective's step copies of a value whose memory is in `order`; see `rewrite.steps`."""
    sizes, shape = tuple(sizes), tuple(shape)
    before, after = local_shape(shape, step.before, sizes), local_shape(shape, step.after, sizes)
    moved = step.message_numel(shape, sizes)
    have, want = step.before[step.axis], step.after[step.axis]
    if is_own(have):
        # Rows that came are sorted by expert, those that go back by the rank they came from.
        rows = moved if isinstance(have, Shard) else 0
        return Packing(moved, 0, rows) if goes_to_experts(have, want) else Packing(moved, rows)
    places = [place for place, length in zip(order, before, strict=False) if length > 1]
    lies_across = places != sorted(places)
    if step.kind == "all_gather":
        shard = _shard(step.before, step.axis)
        if order_behind(step, sizes, order):
            return Packing(moved)
        apart = moved if _is_inside(shard, step.before, before, sizes) else 0
        # What padded shards lack is cut off behind the gather.
        cut = padding(shape, step.before, step.axis, sizes) and math.prod(before[: shard.dim]) > 1
        return Packing(moved, math.prod(before) if lies_across else 0, apart + (math.prod(after) if cut else 0))
    if step.kind == "reduce_scatter":
        filled = moved if padding(shape, step.after, step.axis, sizes) else 0
        inside = _is_inside(_shard(step.after, step.axis), step.before, before, sizes)
        return Packing(moved, filled + (moved if inside or (lies_across and not filled) else 0))
    if step.kind == "all_to_all":
        packs = lies_across or _is_inside(_shard(step.after, step.axis), step.before, before, sizes)
        return Packing(
            moved, moved * packs, moved * _is_inside(_shard(step.before, step.axis), step.after, after, sizes)
        )
    return Packing(moved, moved if step.kind == "all_reduce" and lies_across else 0)


def order_behind(step: Step, sizes: Sequence[int], order: Order) -> Order:
    """Return how what a step makes of a value lies in memory."""
    if not order or step.kind != "all_gather":
        return ()
    whole_rows = order[_shard(step.before, step.axis).dim] == 0
    return order if whole_rows and local_outer(step.before, step.axis, tuple(sizes)) == 1 else ()


def _is_inside(shard: Shard, layout: Layout, local: Sequence[int], sizes: tuple[int, ...]) -> bool:
    """Return whether the blocks of a shard lie inside rows of what a rank holds, of shape `local`, in a layout."""
    return math.prod(local[: shard.dim]) * local_runs(shard, layout, sizes) > 1


def _shard(layout: Layout, axis: int) -> Shard:
    placement = layout[axis]
    if not isinstance(placement, Shard):
        raise TypeError(f"{placement} on axis {axis} is no shard")
    return placement
