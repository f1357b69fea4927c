"""Backward of a stage in two: what the stages before wait for, and the weight gradients, which can fill a bubble."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import fx

from autopar.rewrite.marks import mark
from autopar.rewrite.stage_homes import is_move
from autopar.rewrite.stage_traffic import Program


def halves_of(
    late: Program, terms: Mapping[str, fx.Node], apart: Collection[str]
) -> tuple[Program, Program, tuple[fx.Node, ...]] | None:
    """Return the input-gradient and the weight-gradient half, and the values that go from one to the other.

    The latter half are the nodes of the operators `apart`, with what is there for them alone: redistributions, and
    what the stage makes for itself. `None` if there is no such half.
    """
    order = sorted(late.nodes)
    second = _second(late, order, set(terms.values()), apart)
    if not second:
        return None
    first = late.nodes - second
    between = tuple(node for node in order if node in first and any(user in second for user in node.users))
    passed = [node for node in (*late.sent, *terms.values()) if node not in late.nodes]
    early, rest = _part(late, first, passed), _part(late, second, ())
    kept = {**rest.kept, **dict.fromkeys(between)}
    return replace(early, sent=late.sent), replace(rest, kept=kept), between


def _second(late: Program, order: list[fx.Node], terms: Collection[fx.Node], apart: Collection[str]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in reversed(order):
        users = [user for user in node.users if user in late.nodes]
        wanted = mark(node).origin in apart or is_move(node) or node in late.local
        if (
            node.op == "call_function"
            and wanted
            and node not in late.sent
            and (users or node in terms)
            and found.issuperset(users)
        ):
            found.add(node)
    # A list is no value that one half can hand to the other: its elements are taken where it is made.
    first = late.nodes - found
    return {node for node in found if node.target is not operator.getitem or node.all_input_nodes[0] not in first}


def _part(late: Program, nodes: set[fx.Node], passed: Collection[fx.Node]) -> Program:
    read = {each for node in nodes for each in node.all_input_nodes} | set(passed)
    return replace(
        late,
        nodes=nodes | {each for each in read if each.op == "get_attr"},
        starts={node: None for node in late.starts if node in read},
        kept={node: None for node in late.kept if node in read},
        received={node: None for node in late.received if node in read},
        sent={},
    )
