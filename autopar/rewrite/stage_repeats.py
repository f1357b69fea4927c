"""What backward of one stage makes again, and a later stage reads: too late, since its backward comes first.

Recomputed layers do so where a cut goes through them. The later stage then reads what forward made.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autopar.rewrite.marks import mark
from autopar.rewrite.stage_homes import is_move


def read_forward(
    graph: fx.Graph,
    needed: Collection[fx.Node],
    forward: Collection[fx.Node],
    shared: Collection[fx.Node],
    stage_of: Mapping[str, int],
) -> set[fx.Node]:
    """Let later stages read forward's value instead of backward's equal one; return what must move to forward for it.

    That is what backward alone makes although it depends on no gradient. The graph is edited.
    """
    equal = _equal_in_forward(graph, forward)
    moved: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in equal or node not in needed or node in forward or node in shared or is_move(node):
            continue
        stage = stage_of[mark(node).origin]
        for user in list(node.users):
            if user in needed and any(stage_of[mark(end).origin] > stage for end in _ends(user)):
                if equal[node] in forward:
                    user.replace_input_with(node, equal[node])
                    continue
                for each in node.all_input_nodes if node.target is operator.getitem else ():
                    if equal[each] in forward:
                        node.replace_input_with(each, equal[each])
                moved |= _behind(node, forward)
    return moved


def _equal_in_forward(graph: fx.Graph, forward: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return, for each node that depends on no tangent, a node of equal value: forward's if it has one."""
    found: dict[fx.Node, fx.Node] = {}
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node in forward or node.op == "get_attr":
            found[node] = node
        elif node.op != "call_function" or any(each not in found for each in node.all_input_nodes):
            continue
        key = _key(node, found) if node.op == "call_function" else None
        if key is not None:
            known = first.setdefault(key, node)
            if node not in forward:
                found[node] = known
    return found


def _key(node: fx.Node, equal: Mapping[fx.Node, fx.Node]) -> Any:
    """Return what nodes of equal value have in common; a node by itself where it draws random numbers."""
    target: Any = node.target
    if target is not operator.getitem and torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return node
    if any(each not in equal for each in node.all_input_nodes):
        return node
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: equal[each])
    return target, repr(args), repr(kwargs)


def _ends(user: fx.Node) -> list[fx.Node]:
    """Return the operators at the end of a redistribution that starts with `user`, or it."""
    if user.op == "output":
        return []
    return [end for each in user.users for end in _ends(each)] if is_move(user) else [user]


def _behind(node: fx.Node, forward: Collection[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        each = todo.pop()
        if each not in found and each not in forward and each.op == "call_function":
            found.add(each)
            todo += [*each.all_input_nodes, *(user for user in each.users if user.target is operator.getitem)]
    return found
