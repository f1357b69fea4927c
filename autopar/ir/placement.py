"""Where the elements of a tensor live along each mesh axis.

A *placement* says it for one axis, a *layout* (one placement an axis) for the
mesh. Axes are independent of each other and of their order, because a shard
names the digit it splits: `Shard(d, outer)` views dimension `d` of size `N` as

    [outer, n, N / (outer * n)]          n: size of the mesh axis

and rank `i` of the axis holds `[:, i, :]`. `outer == 1` is the ordinary
contiguous split. Splitting one dimension by two axes nests, DTensor's
`(Shard(0), Shard(0))` on a (2, 4) mesh being `(Shard(0), Shard(0, outer=2))`.
A dimension that merges `[batch, sequence]` and is split along the sequence is
`Shard(0, outer=batch)`.

Tokens that each rank sorts by expert by itself are no part of what one device has, sorted: `Shard(0, own)` says that a
rank holds its own rows in an order of its own, `Partial(own)` that it counts these, `Shard(0, first)` that every rank
holds the first block, places from 0. Where experts are split, `Shard(0, expert)` says that each rank has the rows that
its experts take, as many as these are (a static shape counts as if all took equally many), and of where rows end a
table of all ranks' (`ir.reshard`). `Partial(expert)` says that of each token that rank has what is right whose expert
takes it, others anything. Rows go from own to an expert's order and back; nothing else leads from or to these: who
reads them takes them as they are.

Splits are even, but for what a program starts from and ends with: of a parameter
at rest and of its gradient, the innermost shard of a dimension may be *padded*.
Each rank then has room for `ceil(N / n)` elements, of which the last ranks use
fewer or none, as in DTensor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Rows = Literal["", "own", "first", "expert"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `i` of the axis holds block `i` of dimension `dim`, within each of `outer` runs."""

    dim: int
    outer: int = 1
    rows: Rows = ""
    """`own`: rank `i` has the rows of its block in another order, its own; `first`: every rank has block 0; `expert`:
    rank `i` has those that the experts of block `i` take."""

    def __str__(self) -> str:
        outer = "" if self.outer == 1 else f", outer={self.outer}"
        return f"Shard({self.dim}{outer}{', ' * bool(self.rows)}{self.rows})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank of the axis holds a term; `reduce` of all of them is the value."""

    reduce: str = "sum"
    """`own`: counts of the rank's own rows; `expert`: rows, right on the rank of their expert. Nothing sums these."""

    def __str__(self) -> str:
        return f"Partial({self.reduce})"


Placement = Replicate | Shard | Partial
Layout = tuple[Placement, ...]
"""One placement a mesh axis, in mesh order."""

_SHARD = re.compile(r"S(?:hard)?\((?:dim=)?(\d+)(?:,\s*outer=(\d+))?(?:,\s*(own|first|expert))?\)|S(\d+)")
_ROWS: dict[str | None, Rows] = {None: "", "own": "own", "first": "first", "expert": "expert"}
_PARTIAL = re.compile(r"P(?:artial)?\((\w*)\)|P")


def parse_placement(text: str) -> Placement:
    """Return the placement that `text` names (`Shard(0)`, `S0`, `Replicate()`, `R`, `Partial(sum)`).

    Raises:
        ValueError: the text names none.
    """
    word = text.strip()
    if word in {"R", "Replicate", "Replicate()"}:
        return Replicate()
    if match := _SHARD.fullmatch(word):
        dim, outer, rows, short = match.groups()
        return Shard(int(short if short is not None else dim), int(outer or 1), _ROWS[rows])
    if match := _PARTIAL.fullmatch(word):
        return Partial(match.group(1) or "sum")
    raise ValueError(f"{text!r} is no placement; use Replicate(), Shard(DIM) or Partial(sum)")


def short(placement: Placement | None) -> str:
    """Return the placement's short form for tables and pictures: `R`, `S0`, `S0/8`, `S0own`, `P`."""
    match placement:
        case None:
            return "-"
        case Replicate():
            return "R"
        case Shard(dim, outer, rows):
            return f"S{dim}" + (f"/{outer}" if outer > 1 else "") + rows
        case Partial("sum"):
            return "P"
        case Partial(reduce):
            return f"P{reduce}"


def is_valid(
    shape: Sequence[int], layout: Layout, sizes: Sequence[int], *, padded: bool = False, first: int = 0
) -> bool:
    """Return whether every shard divides its dimension evenly and no two split the same digit.

    Rows on their experts' ranks are split by no other axis but where each rank has its own, or in time (the `first`
    leading axes), where each micro-batch has: how many there are is not known. With `padded`, the innermost of a
    dimension need not divide it, where each rank could have an element.
    """
    by_dim: dict[int, list[tuple[int, int]]] = {}
    for placement, size in zip(layout, sizes, strict=True):
        if isinstance(placement, Shard):
            by_dim.setdefault(placement.dim, []).append((placement.outer, size))
            if placement.rows == "expert" and any(
                isinstance(each, Shard) and each.dim == placement.dim and each.rows in {"", "first"}
                for each in layout[first:]
            ):
                return False
    for dim, digits in by_dim.items():
        if dim >= len(shape):
            return False
        digits.sort()
        end = shape[dim]
        for outer, size in reversed(digits):
            if end == 0 or end % (outer * size):
                if padded and _is_padded(digits, shape[dim]):
                    break
                return False
            end = outer
    return True


def _is_padded(digits: Sequence[tuple[int, int]], elements: int) -> bool:
    """Return whether the digits of a dimension split it one inside the other, all but the innermost evenly."""
    inside = 1
    for outer, size in digits[:-1]:
        if outer != inside:
            return False
        inside *= size
    outer, size = digits[-1]
    return outer == inside and elements % outer == 0 and elements // outer >= size


def padding(shape: Sequence[int], layout: Layout, axis: int, sizes: Sequence[int]) -> int:
    """Return how many elements of its dimension the shard on `axis` lacks to be even; 0 where it is, or is none."""
    mine = layout[axis]
    if not isinstance(mine, Shard):
        return 0
    inside = (p.dim == mine.dim and p.outer > mine.outer for p in layout if isinstance(p, Shard))
    return 0 if any(inside) else -(shape[mine.dim] // mine.outer) % sizes[axis]


def local_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that one rank holds of a tensor of global `shape`, with padding; the layout must be valid."""
    local = list(shape)
    for placement, size in zip(layout, sizes, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // size)
    return tuple(local)


def local_outer(layout: Layout, axis: int, sizes: Sequence[int]) -> int:
    """Return how many runs of the shard on `axis` one rank holds: `outer`, less what other axes split of it."""
    mine = layout[axis]
    if not isinstance(mine, Shard):
        raise ValueError(f"{mine} on axis {axis} is no shard")
    return local_runs(mine, layout, sizes)


def local_runs(shard: Shard, layout: Layout, sizes: Sequence[int]) -> int:
    """Return in how many runs of `shard` lies what a rank holds of a tensor in `layout`, which need not have it."""
    runs = shard.outer
    for placement, size in zip(layout, sizes, strict=True):
        if isinstance(placement, Shard) and placement.dim == shard.dim and placement.outer < shard.outer:
            runs //= size
    return runs


def nest(layout: Layout, sizes: Sequence[int]) -> Layout:
    """Return the layout in which axes that split the same digit split it one inside the other, in mesh order.

    Each axis of `layout` was chosen by itself; `(S0, S0)` on sizes (2, 4) becomes `(S0, S0/2)`.
    """
    taken: dict[tuple[int, int], int] = {}
    nested: list[Placement] = []
    for placement, size in zip(layout, sizes, strict=True):
        if isinstance(placement, Shard):
            digit = placement.dim, placement.outer
            inside = taken.get(digit, 1)
            taken[digit] = inside * size
            nested.append(replace(placement, outer=placement.outer * inside))
        else:
            nested.append(placement)
    return tuple(nested)


def is_own(placement: Placement | None) -> bool:
    """Return whether a rank holds what only means something beside its own other rows, and stays where it is."""
    if isinstance(placement, Shard):
        return placement.rows in {"own", "expert"}
    return isinstance(placement, Partial) and placement.reduce in {"own", "expert"}


def goes_to_experts(before: Placement, after: Placement) -> bool:
    """Return whether rows, or where they end, are brought from each rank's own order to their experts' ranks."""
    if not isinstance(after, Shard) or after.dim or after.rows != "expert":
        return False
    return before == Partial("own") or before == replace(after, rows="own")


def is_at_rest(layout: Layout, sizes: Sequence[int]) -> bool:
    """Return whether a tensor may stay in this layout outside the program: whole, or split one axis inside the other.

    These are the layouts that DTensor writes as plain shards, left to right.
    """
    if any(isinstance(placement, Partial) for placement in layout):
        return False
    plain = tuple(Shard(p.dim) if isinstance(p, Shard) else p for p in layout)
    return nest(plain, sizes) == layout
