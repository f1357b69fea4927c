"""The names and streams that the plan has for a program's collectives, noted on their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from autopar.ir.tasks import GRADIENTS, PARAMETERS, axis_of, collective_name, stream_name
from autopar.rewrite.marks import COLLECTIVES, mark, role

COLLECTIVE = "collective"
"""Key of `node.meta`: what the plan calls the collective that a node issues or waits for."""


def planned_name(start: fx.Node) -> str:
    """Return what the plan calls the collective that a node issues."""
    found = mark(start)
    axis = axis_of(str(start.args[-1]))
    return collective_name(COLLECTIVES[cast("Any", start.target)], found.moves, axis, found.phase)


@dataclass(frozen=True, slots=True)
class NameCollectives:
    """Note on each issue of a collective, and on what waits for it, what the plan calls it. Nothing is changed."""

    def __call__(self, gm: fx.GraphModule) -> int:
        """Mark the nodes and return 0."""
        for node in gm.graph.nodes:
            if role(node) == "start" and node.op == "call_function":
                node.meta[COLLECTIVE] = planned_name(node)
            elif role(node) == "wait" and node.op == "call_function":
                start = node.all_input_nodes[0]
                while start.all_input_nodes and COLLECTIVE not in start.meta:
                    start = start.all_input_nodes[0]
                if COLLECTIVE in start.meta:
                    node.meta[COLLECTIVE] = start.meta[COLLECTIVE]
        return 0


@dataclass(frozen=True, slots=True)
class AssignStreams:
    """Issue the collectives that the plan gives a process group of their own in that group, `AXIS:KIND`."""

    streams: Mapping[str, tuple[str, ...]]

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of collectives assigned."""
        assigned = 0
        for node in gm.graph.nodes:
            if role(node) != "start" or node.op != "call_function":
                continue
            found = mark(node)
            kind = PARAMETERS if found.gathers_parameter else GRADIENTS if found.gradient else ""
            axis = str(node.args[-1])
            if kind in self.streams.get(axis, ()):
                node.args = (*node.args[:-1], stream_name(axis, kind))
                assigned += 1
        return assigned
