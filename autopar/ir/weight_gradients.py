"""Which operators of backward no other gradient waits for: they can run later, to fill a pipeline's bubble."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph, once_per_graph
from autopar.ir.roles import gradient_like

_SEVERAL = ""
"""Stands for more than one gradient, or for what is none of a parameter's."""


def weight_gradients(graph: Graph, stage_of: Mapping[str, int]) -> frozenset[str]:
    """Return the backward operators of which the gradient of one parameter depends, and nothing of another stage.

    Costs and programs of schedules that split backward (zb_h1, zbv) both go by this. Sums of what several stages give
    for a tied parameter do not count as another stage's: they are taken once a step. Operators that make input and
    weight gradients at once, such as those of convolutions, are not among these.
    """
    reached, ends = _reached(graph), gradient_like(graph)
    found: set[str] = set()
    for op in reversed(graph.ops):
        users = graph.users[op.name]
        stays = op.name in ends or all(user in found and stage_of[user] == stage_of[op.name] for user in users)
        if op.kind == "call" and op.phase == "backward" and stays and reached.get(op.name, _SEVERAL) != _SEVERAL:
            found.add(op.name)
    return frozenset(found)


@once_per_graph
def _reached(graph: Graph) -> Mapping[str, str]:
    """Return, for each operator that a result depends on, the one parameter whose gradient that is, or `_SEVERAL`."""
    parameters = {op.name for op in graph.ops if op.kind == "parameter"}
    found: dict[str, str] = {}
    for output in graph.outputs:
        if output.ref is not None:
            own = output.name if output.kind == "gradient" and output.name in parameters else _SEVERAL
            found[output.ref.op] = own if found.get(output.ref.op, own) == own else _SEVERAL
    for op in reversed(graph.ops):
        if op.name in found:
            own = found[op.name]
            for ref in op.refs:
                found[ref.op] = own if found.get(ref.op, own) == own else _SEVERAL
    return found
