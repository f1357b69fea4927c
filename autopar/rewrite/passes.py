"""What a pass is, and the one place that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

Pass = Callable[[fx.GraphModule], int]
"""Edits a graph in place and returns how many changes it made."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A pass that was run, and how many changes it made."""

    by: str
    changes: int

    def __str__(self) -> str:
        return f"{self.by}: {self.changes}"


def run_passes(gm: fx.GraphModule, passes: Sequence[Pass]) -> tuple[Applied, ...]:
    """Run `passes` in order, checking the graph after each one that acted."""
    log = []
    for each in passes:
        changes = each(gm)
        if changes:
            gm.graph.lint()
        log.append(Applied(by=repr(each), changes=changes))
    gm.recompile()
    return tuple(log)
