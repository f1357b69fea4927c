"""Which steps lead from one layout of a tensor to another: the only place that knows.

Costs price these steps, the rewriter emits them, the report lists them. Every
step works on one mesh axis, so any route is a sequence of five kinds:

    slice           Replicate -> Shard     keep the own block; no communication
    mask            Replicate -> Partial   keep the value on rank 0 of the axis, zero elsewhere; no communication
    reduce_scatter  Partial   -> Shard
    all_to_all      Shard     -> Shard     of another dimension or digit
    all_reduce      Partial   -> Replicate
    all_gather      Shard     -> Replicate

Rows that ranks have in an order of their own go to the ranks of their experts by an all_to_all of unequal blocks, and
back by another. How many go where, each rank tells all others first: an all_gather of where its rows end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autopar.ir.placement import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    goes_to_experts,
    is_own,
    is_valid,
    local_shape,
    padding,
)

StepKind = Literal["slice", "mask", "reduce_scatter", "all_to_all", "all_reduce", "all_gather"]

_ORDER: dict[StepKind, int] = {
    "slice": 0, "reduce_scatter": 1, "all_to_all": 2, "all_reduce": 3, "all_gather": 4, "mask": 5
}  # fmt: skip
"""Steps that shrink the local tensor first, so that the following ones move less."""

PACKED_BYTES = 2**16
"""Rows from this size on are sent by themselves on gloo; of smaller ones that travel together one buffer is made."""

SUMMED_BYTES = 2 << 20
"""Tensors from this size on are summed by themselves on gloo; of smaller ones that travel together one buffer is made.

A call takes 0.8 ms (`autopar calibrate`, 1 Gbit/s), in which a core copies 2 MiB to a buffer and back.
"""

AHEAD_BYTES = 64 << 20
"""Bytes of gathered parameters that a program may hold ahead of their use."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step on one mesh axis; `before` and `after` are whole layouts."""

    kind: StepKind
    axis: int
    before: Layout
    after: Layout

    @property
    def communicates(self) -> bool:
        """Return whether ranks exchange anything."""
        return self.kind not in {"slice", "mask"}

    def message_numel(self, shape: Sequence[int], sizes: Sequence[int]) -> int:
        """Return the elements of the larger of the local tensors before and after it.

        That is the reduced buffer of an all_reduce, the gathered one of an all_gather,
        the whole input of a reduce_scatter, the local buffer of an all_to_all; with padding.
        """
        before, after = (math.prod(local_shape(shape, layout, sizes)) for layout in (self.before, self.after))
        if self.kind == "all_gather":
            return before * sizes[self.axis]
        return after * sizes[self.axis] if self.kind == "reduce_scatter" else max(before, after)


class NoRouteError(ValueError):
    """No sequence of steps leads from one layout to the other (a Partial of another reduction, say)."""


def _kind(before: Placement, after: Placement) -> StepKind:
    if not _leads(before, after):
        raise NoRouteError(f"nothing leads from {before} to {after}")
    match before, after:
        case Partial("own"), Shard():
            return "all_gather"
        case Replicate(), Shard():
            return "slice"
        case Replicate(), Partial("sum"):
            return "mask"
        case Partial(), Shard():
            return "reduce_scatter"
        case Partial(), Replicate():
            return "all_reduce"
        case Shard(), Shard():
            return "all_to_all"
        case Shard(), Replicate():
            return "all_gather"
    raise NoRouteError(f"no collective leads from {before} to {after}")


@lru_cache(maxsize=1 << 18)
def route(
    before: Layout, after: Layout, shape: tuple[int, ...], sizes: tuple[int, ...], first: int = 0
) -> tuple[Step, ...]:
    """Return the steps that turn a tensor of global `shape` from layout `before` into `after`; none if equal.

    The `first` leading axes (those in time, which move nothing) are settled before the others. Then
    steps that shrink come first; where two axes block each other (each wants the
    digit that the other still splits), one is gathered and sliced again.

    Raises:
        NoRouteError: some axis would need a reduction that `before` does not hold.
    """
    steps: list[Step] = []
    now = before
    for goal in ((*after[:first], *before[first:]), after) if first else (after,):
        while now != goal:
            step = _next(now, goal, shape, sizes, first)
            steps.append(step)
            now = step.after
    return tuple(steps)


def _next(now: Layout, after: Layout, shape: tuple[int, ...], sizes: tuple[int, ...], first: int) -> Step:
    found: list[tuple[int, int, StepKind, Layout]] = []
    for axis, (have, want) in enumerate(zip(now, after, strict=True)):
        if have == want:
            continue
        reached = (*now[:axis], want, *now[axis + 1 :])
        uneven = isinstance(have, Shard) and bool(
            padding(shape, now, axis, sizes) or padding(shape, reached, axis, sizes)
        )
        kind = _kind_through_replicate(have, want, sizes[axis], uneven=uneven)
        if kind == "all_gather" and isinstance(have, Shard):
            reached = (*now[:axis], Replicate(), *now[axis + 1 :])
        if is_valid(shape, reached, sizes, padded=True, first=first):
            found.append((_ORDER[kind], axis, kind, reached))
    if found:
        _, axis, kind, reached = min(found)
        return Step(kind, axis, now, reached)
    for axis, (have, want) in enumerate(zip(now, after, strict=True)):
        if have != want and isinstance(have, Shard):
            return Step("all_gather", axis, now, (*now[:axis], Replicate(), *now[axis + 1 :]))
    raise NoRouteError(f"no steps lead from {now} to {after} for shape {shape}")


def _kind_through_replicate(have: Placement, want: Placement, size: int, *, uneven: bool) -> StepKind:
    """Return the step to take now: the direct one, or the gather before it.

    A shard is gathered first where it becomes a partial, or a shard of a digit that overlaps
    its own, or one of both is padded: ranks would then exchange blocks of unequal size.
    """
    if (
        isinstance(have, Shard)
        and not is_own(have)
        and _leads(have, want)
        and (isinstance(want, Partial) or uneven or _overlap(have, want, size))
    ):
        return "all_gather"
    return _kind(have, want)


def _overlap(have: Shard, want: Placement, size: int) -> bool:
    """Return whether both split one dimension, and neither digit lies within the other's runs."""
    if not isinstance(want, Shard) or have.dim != want.dim:
        return False
    inner, outer = max(have.outer, want.outer), min(have.outer, want.outer)
    return bool(inner % (outer * size))


def is_reachable(before: Layout, after: Layout) -> bool:
    """Return whether `route` finds steps from `before` to `after`."""
    return all(
        have == want
        or (
            _leads(have, want)
            and (not isinstance(want, Partial) or (want.reduce == "sum" and not isinstance(have, Partial)))
        )
        for have, want in zip(before, after, strict=True)
    )


def _leads(have: Placement, want: Placement) -> bool:
    """Return whether ranks may bring rows from one placement to another: first ones are cut of all.

    Own rows go to their experts and back, and nowhere else.
    """
    if not _has_order(have) and not _has_order(want):
        return True
    if goes_to_experts(have, want) or (isinstance(have, Shard) and goes_to_experts(want, have)):
        return True
    first = any(isinstance(each, Shard) and each.rows == "first" for each in (have, want))
    return not is_own(have) and not is_own(want) and (not first or have == Replicate())


def _has_order(placement: Placement) -> bool:
    """Return whether it is of rows of a rank's own choice, or of the first ones."""
    return bool(placement.rows) if isinstance(placement, Shard) else is_own(placement)
