"""Backward of a stage in two: what the stages before wait for, and the weight gradients, which can fill a bubble."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from torch import fx

from autopar.rewrite.stage_traffic import Program


def halves_of(late: Program, terms: Mapping[str, fx.Node]) -> tuple[Program, Program, tuple[fx.Node, ...]] | None:
    """Return the input-gradient and the weight-gradient half, and the values that go from one to the other.

    The latter half is all that no sent value depends on; where nothing is sent, what one gradient of `terms` alone
    depends on. `None` if there is no such half.
    """
    order = sorted(late.nodes)
    second = _after_sent(late, order) if late.sent else _of_one(order, terms)
    for node in order:
        if node.target is operator.getitem and node.args[0] not in second:
            second.discard(node)
    first = late.nodes - second
    if not second or not first:
        return None
    between = tuple(node for node in order if node in first and any(user in second for user in node.users))
    passed = [node for node in (*late.sent, *terms.values()) if node not in late.nodes]
    early, rest = _part(late, first, passed), _part(late, second, ())
    kept = {**rest.kept, **dict.fromkeys(between)}
    return replace(early, sent=late.sent), replace(rest, kept=kept), between


def _after_sent(late: Program, order: Iterable[fx.Node]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    todo = [node for node in late.sent if node in late.nodes]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [each for each in node.all_input_nodes if each in late.nodes]
    return {node for node in order if node not in needed and node.op == "call_function"}


def _of_one(order: list[fx.Node], terms: Mapping[str, fx.Node]) -> set[fx.Node]:
    reached: dict[fx.Node, set[str]] = {}
    for node in reversed(order):
        own = {name for name, term in terms.items() if term is node}
        reached[node] = own.union(*(reached[user] for user in node.users if user in reached))
    return {node for node in order if len(reached[node]) <= 1 and node.op == "call_function"}


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
