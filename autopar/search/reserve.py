"""Memory that an assignment leaves to something else, which is worth seconds: one decision more of a table.

Layouts that are fastest take all memory there is, for whole parameters and whole sums of gradients. What recomputes
all its blocks can do with less, and what the rest is worth to whoever then recomputes fewer is more, often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.ir.table import CostTable, Floats, MemoryRow, Node
from autopar.search.recomputing import Ways, undone

_LEVELS = 16
"""How many amounts to choose from at most; what lies between is for who recomputes less to find."""


def worth(ways: Ways, copies: Floats, most_bytes: float) -> tuple[Floats, Floats]:
    """Return amounts of memory up to `most_bytes`, and the seconds of recomputation that each spares a micro-batch.

    `copies` of what each block keeps are there at a time. What spares most for its memory comes first.
    """
    steps = sorted(undone(Ways(ways.seconds, ways.kept_bytes * copies[:, None])), key=lambda each: -each[0] / each[1])
    spared, held = (np.append(0.0, np.cumsum([each[at] for each in steps])) for at in (0, 1))
    # Blocks are recomputed or not: what lies between two steps is worth no more than the first.
    least_bytes = np.linspace(0.0, min(most_bytes, float(held[-1])), _LEVELS)
    taken = np.unique(np.searchsorted(held, least_bytes, side="right") - 1)
    return held[taken], spared[taken]


def reserving(table: CostTable, amounts_bytes: Floats, spared_s: Floats) -> CostTable:
    """Return a table whose last node reserves one of some amounts, each of which spares seconds of a step."""
    place, freed = len(table.nodes), table.freed
    lost_s = float(spared_s.max()) - spared_s
    node = Node("reserve", np.zeros((len(amounts_bytes), table.segments)), lost_s)

    def row(at: int) -> MemoryRow:
        found = table.memory_row(at)
        return replace(found, nodes={**found.nodes, place: amounts_bytes})

    def curve(options: tuple[int, ...], copies: Sequence[set[tuple[int, int]]]) -> Floats:
        held: Floats = table.memory_curve(options[:-1], copies) + amounts_bytes[options[-1]]
        return held

    without = None if freed is None else lambda options: freed(options[:-1])
    return replace(table, nodes=(*table.nodes, node), memory_row=row, memory_curve=curve, freed=without)
