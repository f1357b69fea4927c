"""What the search reads: choices with prices and bytes, and nothing of what they mean.

Time is cut into segments, forward ones first. Work of a segment runs one after
the other; a *reduction* made in a segment may run behind all later ones, a
*prefetch* needed in a segment behind all earlier ones of its phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Category = Literal["critical", "reduction", "prefetch"]


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One decision: exactly one of its options is taken."""

    name: str
    seconds: Floats
    """[options, segments] seconds of all equal instances together, own collectives included."""

    optimizer_s: Floats
    """[options] seconds of the optimizer step of what is decided here."""

    @property
    def options(self) -> int:
        """Return the number of options."""
        return len(self.seconds)


@dataclass(frozen=True, eq=False, slots=True)
class Demand:
    """What a consumer needs of a value, by its own options."""

    node: int
    layout: Ints
    """[options of the node] index of the layout needed."""


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """One value and those of its readers that share each redistributed copy of it."""

    name: str
    source: int
    layout: Ints
    """[options of the source] index of the layout that the value is made in."""

    demands: tuple[Demand, ...]
    price_s: Floats
    """[source layouts, demanded layouts] seconds of one redistribution; infinite where impossible."""

    hidden_s: Floats
    """[source layouts, demanded layouts] the part of `price_s` that computation can run behind; 0 if critical."""

    category: Category
    counts: Floats
    """[segments] how many instances of the value are redistributed in each segment."""

    at_end_s: Floats | None = None
    """[source layouts, demanded layouts] the part of what is not hidden that one of several micro-batches can hide;
    `None` where there is nothing of the kind."""


@dataclass(frozen=True, eq=False, slots=True)
class MemoryRow:
    """Bytes that one device holds at one moment, as a function of the decisions."""

    at: int
    """Position in the program's order."""

    fixed_bytes: float
    nodes: Mapping[int, Floats]
    """[options] bytes of what the node's values hold at that moment."""

    groups: Mapping[int, Floats]
    """[source layouts, demanded layouts] bytes of redistributed copies alive at that moment."""


@dataclass(frozen=True, eq=False, slots=True)
class CostTable:
    """All decisions of one program on one mesh, priced."""

    nodes: tuple[Node, ...]
    groups: tuple[Group, ...]
    forward_segments: int
    segments: int
    memory_row: Callable[[int], MemoryRow]
    """Memory at a position of the program's order."""

    memory_curve: Callable[[tuple[int, ...], Sequence[set[tuple[int, int]]]], Floats]
    """Bytes held at every position, given each node's option and each group's copies (source, demanded layout)."""

    microbatches: int = 1
    """Of a step, whose seconds are all of theirs."""

    freed: Callable[[tuple[int, ...]], Floats] | None = None
    """Bytes at every position that rows and curve count and an assignment does not hold, where that is known: rows,
    whose layouts are open, count a value up to its last reader, also where that reads a copy in another layout."""
