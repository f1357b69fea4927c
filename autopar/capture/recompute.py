"""Recomputation as a program: backward runs a block's forward operators again instead of keeping their results.

        forward                       backward
    x → [a → b → c] → y           …  a'  b'  c'  then what read a, b, c reads a', b', c'

The result is an ordinary joint program in which the copies are backward
operators like any others, so costs, memory, search and rewriter need know
nothing of it. Kept are what blocks hand to one another, and random values,
which cannot be drawn again.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping

from torch import fx

from autopar.capture.captured import Captured
from autopar.ir.graph import Arg, Graph, Op, Ref

SUFFIX = "_again"
"""Appended to the name of an operator, it names its copy in backward."""

_BLOCK = re.compile(r"^(?:[^.]+\.)*?\d+(?=\.|$)")
_RANDOM = ("dropout", "bernoulli", "rand", "normal", "multinomial")


def recomputed(captured: Captured) -> Captured:
    """Return the program in which every block of layers (a child of a module list) is recomputed in backward.

    The joint graph is changed in place: `captured` must not be used afterwards.
    """
    plan = copies_of(captured.graph)
    _copy_nodes(captured, plan)
    return dataclasses.replace(captured, graph=recomputed_graph(captured.graph))


def block_of(op: Op) -> str:
    """Return the path of the layer an operator belongs to: its module path up to the first number; empty if none."""
    match = _BLOCK.match(op.module)
    return match.group(0) if match else ""


def copies_of(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the forward operators to run again, in order, by the backward operator before which they run."""
    forward = {op.name: block_of(op) for op in graph.ops if _repeats(op)}
    kept = {
        ref.op
        for op in graph.ops
        if op.phase == "forward"
        for ref in op.refs
        if ref.op in forward and block_of(op) != forward[ref.op]
    }
    kept |= {output.ref.op for output in graph.outputs if output.ref is not None}
    wanted: dict[str, set[str]] = {}
    first: dict[str, str] = {}
    for op in graph.ops:
        if op.phase != "backward":
            continue
        for ref in op.refs:
            block = forward.get(ref.op)
            if block is not None and ref.op not in kept:
                first.setdefault(block, op.name)
                _need(graph, ref.op, forward, kept, wanted.setdefault(block, set()))
    return {first[block]: tuple(op.name for op in graph.ops if op.name in names) for block, names in wanted.items()}


def recomputed_graph(graph: Graph) -> Graph:
    """Return the graph with the copies in it; equal layers' copies are as equal as they."""
    plan = copies_of(graph)
    again = {name for names in plan.values() for name in names}
    ops: list[Op] = []
    for op in graph.ops:
        ops.extend(_renamed(graph.by_name[name], again) for name in plan.get(op.name, ()))
        ops.append(_reading_copies(op, again) if op.phase == "backward" else op)
    fold = dict(graph.fold)
    for name in again:
        rep = graph.representative(name)
        if rep != name and rep in again:
            fold[name + SUFFIX] = rep + SUFFIX
    return dataclasses.replace(graph, ops=tuple(ops), fold=_congruent(tuple(ops), fold))


def _repeats(op: Op) -> bool:
    """Return whether an operator may run again: a forward call in a block whose values are not drawn at random."""
    return op.kind == "call" and op.phase == "forward" and bool(block_of(op)) and not _is_random(op)


def _is_random(op: Op) -> bool:
    if any(word in op.target for word in _RANDOM):
        return True
    probability = [arg for arg in op.args if isinstance(arg, float)]
    return "attention" in op.target and any(0.0 < p < 1.0 for p in probability[:1])


def _need(graph: Graph, name: str, forward: Mapping[str, str], kept: set[str], found: set[str]) -> None:
    """Add an operator and what must run again before it."""
    pending = [name]
    while pending:
        one = pending.pop()
        if one in found or one not in forward or one in kept:
            continue
        found.add(one)
        pending += [ref.op for ref in graph.by_name[one].refs if forward.get(ref.op) == forward[one]]


def _renamed(op: Op, again: set[str]) -> Op:
    copy = _reading_copies(op, again)
    return dataclasses.replace(copy, name=op.name + SUFFIX, phase="backward")


def _reading_copies(op: Op, again: set[str]) -> Op:
    def swap(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(arg.op + SUFFIX, arg.index) if arg.op in again else arg
        return tuple(map(swap, arg)) if isinstance(arg, tuple) else arg

    args = tuple(map(swap, op.args))
    kwargs = tuple((key, swap(value)) for key, value in op.kwargs)
    return dataclasses.replace(op, args=args, kwargs=kwargs)


def _congruent(ops: tuple[Op, ...], fold: dict[str, str]) -> dict[str, str]:
    """Return the fold without operators that no longer read what their representative reads, layer for layer."""
    by_name = {op.name: op for op in ops}
    return {
        name: rep
        for name, rep in fold.items()
        if [ref.op.endswith(SUFFIX) for ref in by_name[name].refs] == [r.op.endswith(SUFFIX) for r in by_name[rep].refs]
    }


def _copy_nodes(captured: Captured, plan: Mapping[str, tuple[str, ...]]) -> None:
    """Put the copies into the joint graph, each block's before the node that first needs it."""
    graph = captured.joint.graph
    nodes = {node.name: node for node in graph.nodes}
    copies: dict[fx.Node, fx.Node] = {}
    for anchor, names in plan.items():
        with graph.inserting_before(nodes[anchor]):
            for name in names:
                original = nodes[name]
                for each in (original, *(user for user in original.users if user.target is operator.getitem)):
                    copies[each] = _copy(graph, each, copies)
    late = {op.name for op in captured.graph.ops if op.phase == "backward"}
    made = set(copies.values())
    for node in graph.nodes:
        if node.name in late and node not in made:
            node.args = fx.map_arg(node.args, lambda each: copies.get(each, each))
            node.kwargs = fx.map_arg(node.kwargs, lambda each: copies.get(each, each))
    graph.lint()
    captured.joint.recompile()


def _copy(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    args = fx.map_arg(node.args, lambda each: copies.get(each, each))
    kwargs = fx.map_arg(node.kwargs, lambda each: copies.get(each, each))
    copy = graph.create_node(node.op, node.target, args, kwargs, name=node.name + SUFFIX)
    copy.meta = {**node.meta, "partitioner_tag": "is_backward"}
    return copy
