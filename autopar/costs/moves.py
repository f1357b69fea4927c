"""Which values are moved to another layout on their way, what moves them first, and what no collective follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autopar.costs.issued import Copy
from autopar.ir.graph import Graph, Op, Ref
from autopar.ir.placement import Layout
from autopar.ir.roles import last_steps, parameter_like

if TYPE_CHECKING:
    from autopar.costs.outcome import Outcome


def roots_of(graph: Graph) -> dict[str, str]:
    """Return, for each operator that only views or casts a parameter, the representative of that parameter."""
    starts = parameter_like(graph)
    roots: dict[str, str] = {}
    for op in graph.ops:
        if op.name in starts:
            roots[op.name] = roots[op.refs[0].op] if op.refs else graph.representative(op.name)
    return roots


def copy_read(outcome: Outcome, roots: Mapping[str, str], op: Op, ref: Ref, need: Layout) -> Copy | None:
    """Return the copy by which an operator reads a value in a layout; `None` if it is made in that layout."""
    have = outcome.layout(outcome.graph.representative(ref.op), ref.index)
    apart = ref.op in roots and not outcome.keeps_gather(roots[ref.op])
    return None if have == need else (ref.op, ref.index, need, op.phase if apart else "")


def moved_before(outcome: Outcome, roots: Mapping[str, str]) -> set[str]:
    """Return what is made of a parameter that was moved already: its gather waits for another, so it goes alone."""
    graph = outcome.graph
    found: set[str] = set()
    for op in graph.ops:
        if op.name in roots and op.refs:
            (need,) = outcome.strategy(graph.representative(op.name)).inputs
            if op.refs[0].op in found or copy_read(outcome, roots, op, op.refs[0], need) is not None:
                found.add(op.name)
    return found


def settled_by(outcome: Outcome) -> set[str]:
    """Return the last steps of gradients that are where their parameters are: no collective follows any of them.

    A reduction before them can be waited for at the end of backward. Where its result is cast in parts and gathered
    again, that gather waits for it.
    """
    graph = outcome.graph
    last = last_steps(graph)
    moved = {
        each.ref.op
        for each in graph.outputs
        if each.kind == "gradient"
        and each.ref is not None
        and outcome.layout(graph.representative(each.ref.op), each.ref.index)
        != outcome.layout(graph.representative(each.name))
    }
    found: set[str] = set()
    for op in reversed(graph.ops):
        if op.name not in last or op.name in moved:
            continue
        made = outcome.layout(graph.representative(op.name))
        if all(
            user in found and outcome.strategy(graph.representative(user)).inputs == (made,)
            for user in graph.users[op.name]
        ):
            found.add(op.name)
    return found


def readers(outcome: Outcome, ref: Ref, need: Layout, phase: str | None) -> tuple[str, ...]:
    """Return the operators that read a value in a layout; of one phase only, where each has a copy of its own."""
    graph = outcome.graph
    found = []
    for user in dict.fromkeys(graph.users[ref.op]):
        op = graph.by_name[user]
        inputs = zip(op.refs, outcome.strategy(graph.representative(user)).inputs, strict=True)
        if (ref, need) in inputs and phase in (None, op.phase):
            found.append(user)
    return tuple(found)
