"""Equal layers, found by structure."""

from __future__ import annotations

from autopar.ir.graph import Graph


def find_blocks(graph: Graph) -> dict[str, str]:
    """Return, for every operator that an equal one in an earlier block stands for, the name of that one."""
    return {}
