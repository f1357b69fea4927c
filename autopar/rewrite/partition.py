"""The cut of a local program into forward and backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._torch import LazyGraphModule, storage_key
from autopar.ir.graph import Graph
from autopar.rewrite.marks import mark, role
from autopar.rewrite.programs import Saved

_CLONE = torch.ops.aten.clone.default


@dataclass(frozen=True)
class Cut:
    """Forward and backward programs, and what goes from one to the other."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[Saved, ...]


def partition(gm: fx.GraphModule, graph: Graph) -> Cut:
    """Return the two programs: forward makes user outputs and new buffer values, backward the gradients.

    Saved is what backward's operators read of forward's; parameters and inputs are saved as
    references, and views hold no memory of their own.
    """
    output = next(iter(gm.graph.find_nodes(op="output")))
    results: Sequence[fx.Node | None] = output.args[0]
    kinds = [each.kind for each in graph.outputs]
    gradients = [node for node, kind in zip(results, kinds, strict=True) if kind == "gradient"]
    by_kind = list(zip(results, kinds, strict=True))
    visible = [node for want in ("output", "mutation") for node, kind in by_kind if kind == want]
    tangents = [graph_op.name for graph_op in graph.ops if graph_op.kind == "tangent"]
    placeholders = gm.graph.find_nodes(op="placeholder")
    starts = [node for node in placeholders if node.name not in tangents]
    needed = ancestors([node for node in [*visible, *gradients] if node is not None])
    early = ancestors([node for node in visible if node is not None])
    forward = {node for node in needed if node in early or is_forward(node, tangents)}
    forward |= {node for node in placeholders if node.name not in tangents}
    forward |= early_cuts(gm.graph, needed, forward)
    backward = [node for node in gm.graph.nodes if node in needed and node not in forward and node.op != "placeholder"]
    mutated = {each.name for each in graph.outputs if each.kind == "mutation"}
    crossing = own_memory(gm.graph, crossing_values(backward, gradients, forward), starts, mutated)
    forward |= set(crossing)
    gradients = _own_gradients(gm.graph, gradients)
    backward += [node for node in gradients if node is not None and node not in forward and node not in backward]
    user = [node for node, kind in zip(results, kinds, strict=True) if kind == "output"]
    saved, extra = _find(crossing, starts, user)
    early_nodes = [node for node in gm.graph.nodes if node in forward and node.op != "placeholder"]
    first = _build(gm, early_nodes, starts, [*visible, *extra])
    if not any(kind == "gradient" for kind in kinds):
        return Cut(first, None, ())
    late = [node for node in placeholders if node.name in tangents]
    second = _build(gm, backward, [*crossing, *late], gradients, late)
    return Cut(first, second, saved)


def is_forward(node: fx.Node, tangents: Sequence[str]) -> bool:
    """Return whether a node was written for forward; placeholders but tangents are there."""
    if node.op == "placeholder":
        return node.name not in tangents
    return mark(node).phase == "forward"


def ancestors(roots: Iterable[fx.Node], leaves: Collection[Any] = ()) -> set[fx.Node]:
    """Return the nodes that `roots` depend on, themselves included; nothing that calls of `leaves` depend on."""
    found: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [] if node.target in leaves else node.all_input_nodes
    return found


def early_cuts(graph: fx.Graph, needed: set[fx.Node], forward: set[fx.Node]) -> set[fx.Node]:
    """Return slices that backward cuts from forward values which it reads nothing else of: saving them is less."""
    early: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in forward or node.op == "placeholder" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        late = [user for user in node.users if user in needed and user not in forward and user.op != "output"]
        cuts = [user for user in late if role(user) == "move" and is_cut(user)]
        if late and len(cuts) == len(late) and sum(cut.meta["val"].nbytes for cut in cuts) < node.meta["val"].nbytes:
            early.update(cuts)
    return early


def crossing_values(
    backward: Sequence[fx.Node], gradients: Sequence[fx.Node | None], forward: set[fx.Node]
) -> list[fx.Node]:
    """Return the forward nodes that backward reads, each once, in order of first use; constants are no values."""
    read: dict[fx.Node, None] = {}
    for node in backward:
        read.update(dict.fromkeys(each for each in node.all_input_nodes if each in forward))
    read.update(dict.fromkeys(node for node in gradients if node is not None and node in forward))
    return [node for node in read if node.op != "get_attr"]


def own_memory(
    graph: fx.Graph, crossing: Sequence[fx.Node], starts: Sequence[fx.Node], mutated: Collection[str]
) -> list[fx.Node]:
    """Copy what would else be saved as part of something larger, or be overwritten before backward reads it.

    The former is a slice that a redistribution cut from a value which nothing else keeps
    alive, the latter a buffer that this step gives a new value.
    """
    tensors = [node for node in crossing if isinstance(node.meta["val"], torch.Tensor)]
    held = {storage_key(node.meta["val"]) for node in [*starts, *(each for each in tensors if not is_cut(each))]}
    kept = []
    for node in crossing:
        overwritten = node in starts and node.name in mutated
        if overwritten or (is_cut(node) and storage_key(node.meta["val"]) not in held):
            copy = copied_behind(graph, node)
            readers = [user for user in node.users if user is not copy and mark(user).phase == "backward"]
            for user in readers if overwritten else [user for user in node.users if user is not copy]:
                user.replace_input_with(node, copy)
            node = copy
        kept.append(node)
    return kept


def _own_gradients(graph: fx.Graph, gradients: Sequence[fx.Node | None]) -> list[fx.Node | None]:
    """Copy each gradient that a redistribution cut from a larger one, which would else stay alive with it."""
    whole = torch.contiguous_format
    return [copied_behind(graph, node, whole) if node is not None and is_cut(node) else node for node in gradients]


def copied_behind(
    graph: fx.Graph, node: fx.Node, memory_format: torch.memory_format = torch.preserve_format
) -> fx.Node:
    """Return a new node behind `node` that copies it, or behind all placeholders if it is one.

    Dimensions keep their order in memory: readers may view the copy as they viewed what it copies.
    """
    behind = node if node.op != "placeholder" else graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(behind):
        copy = graph.call_function(_CLONE, (node,), {"memory_format": memory_format})
    made = torch.empty_like(node.meta["val"], memory_format=memory_format)
    copy.meta = {**node.meta, "val": made, "autopar": replace(mark(node), role="move")}
    return copy


def is_cut(node: fx.Node) -> bool:
    """Return whether a redistribution cut the value from something larger, which it keeps alive."""
    value = node.meta["val"]
    return role(node) == "move" and isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes


def _find(
    crossing: Sequence[fx.Node], starts: Sequence[fx.Node], user: Sequence[fx.Node | None]
) -> tuple[tuple[Saved, ...], list[fx.Node]]:
    """Return where each saved value is found, and those that forward must return for it."""
    saved: list[Saved] = []
    extra: list[fx.Node] = []
    for node in crossing:
        if node in starts:
            saved.append(Saved("input", starts.index(node), node.name))
        elif node in user:
            saved.append(Saved("output", user.index(node), node.name))
        else:
            saved.append(Saved("value", len(extra), node.name))
            extra.append(node)
    return tuple(saved), extra


def _build(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node | None],
    tangents: Sequence[fx.Node] = (),
) -> fx.GraphModule:
    """Return the program of `nodes` that reads `inputs`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {**node.meta, "tangent": node in tangents}
    for node in [each for each in nodes if each.op != "get_attr"]:
        for each in node.all_input_nodes:
            if each.op == "get_attr" and each not in copies:
                copies[each] = graph.node_copy(each)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if node is None else copies[node] for node in results))
    made = LazyGraphModule(gm, graph)
    graph.lint()
    return made


def copied(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph whose nodes carry the same marks and values."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
    return made
