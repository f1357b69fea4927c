"""Seconds of one assignment of a cost table: what the search minimises, said once more and plainly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.table import CostTable, Floats, Group


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step on one device."""

    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """Return the seconds of a step: forward, backward, optimizer."""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Beyond:
    """[segment] seconds that are no part of a table: those that computation can run behind, and those it cannot."""

    hidden_s: Floats
    shown_s: Floats


def pairs(group: Group, options: Sequence[int]) -> set[tuple[int, int]]:
    """Return the layouts that copies of the group's value lead between."""
    source = int(group.layout[options[group.source]])
    return {(source, int(demand.layout[options[demand.node]])) for demand in group.demands}


def timing(table: CostTable, options: Sequence[int], beyond: Beyond | None = None) -> Timing:
    """Return the seconds of an assignment and of what is `beyond` it, overlap taken into account as in `search.ilp`."""
    work = np.zeros(table.segments) if beyond is None else beyond.shown_s.copy()
    hidden = np.zeros(table.segments) if beyond is None else beyond.hidden_s.copy()
    for node, option in zip(table.nodes, options, strict=True):
        work += node.seconds[option]
    for group in table.groups:
        for pair in pairs(group, options):
            if not np.isfinite(group.price_s[pair]):
                return Timing(np.inf, np.inf, 0.0)
            hidden += group.counts * group.hidden_s[pair]
            work += group.counts * (group.price_s[pair] - group.hidden_s[pair])
    cut = table.forward_segments
    return Timing(
        forward_s=_span(hidden[:cut], work[:cut]),
        backward_s=_span(work[cut:], hidden[cut:]) if table.segments > cut else 0.0,
        optimizer_s=float(sum(node.optimizer_s[option] for node, option in zip(table.nodes, options, strict=True))),
    )


def hidden_at_ends_s(table: CostTable, options: Sequence[int]) -> float:
    """Return the most that the first and the last of several micro-batches can hide of what runs once a step."""
    if table.microbatches == 1:
        return 0.0
    cut, found = table.forward_segments, 0.0
    for category, phase in (("prefetch", slice(0, cut)), ("reduction", slice(cut, None))):
        spent = sum(float(node.seconds[at, phase].sum()) for node, at in zip(table.nodes, options, strict=True))
        ends = ((group, group.at_end_s) for group in table.groups if group.category == category)
        once = sum(
            float(group.counts.sum() * at_end_s[pair])
            for group, at_end_s in ends
            if at_end_s is not None
            for pair in pairs(group, options)
        )
        found += min(once, spent / table.microbatches)
    return found


def _span(first: Floats, then: Floats) -> float:
    """Return the makespan of two streams where what `then` does in a segment needs what `first` did up to it."""
    through = np.cumsum(first)
    left = np.cumsum(then[::-1])[::-1]
    return float(max(first.sum(), then.sum(), (through + left).max(initial=0.0)))
