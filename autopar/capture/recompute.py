"""Recomputation as a program: backward runs a block's forward operators again instead of keeping their results.

        forward                       backward
    x → [a → b → c] → y           …  a'  b'  c'  then what read a, b, c reads a', b', c'

The result is an ordinary joint program in which the copies are backward
operators like any others, so costs, memory, search and rewriter need know
nothing of it. Kept are what blocks hand to one another, and random values,
which our programs cannot draw again. Other software keeps the generator's state
and draws them again (`redraws`), which is priced, but is not a program that runs.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Literal

from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.origin import layer_path
from autopar.errors import StalePlanError
from autopar.ir.graph import Arg, Graph, Op, Ref
from autopar.ir.roles import computes, is_attention, is_view, parameter_like

SUFFIX = "_again"
"""Appended to the name of an operator, it names its copy in backward."""

_RANDOM = ("dropout", "bernoulli", "rand", "normal", "multinomial")


Way = Literal["full", "whole", "casts", "cheap", "selective", "per_operator", "keep_attention", "products"]
"""What of a block runs again.

full            all of it that backward needs
whole           all of it to its end: what reentrant checkpointing does; for prices alone
casts           parameters in other types: as large for each micro-batch in flight as for all samples
cheap           all but what computes (`autopar.ir.roles.computes`): norms, activations, rotations and sums
selective       the core of attention: scores, and kernels that have them inside (Korthikanti et al. 2022, section 5)
per_operator    all but attention kernels and every second matrix product (torchtitan's `selective_ac_option: op`)
keep_attention  all but attention kernels: where sequences are long they take most of the time and leave the least
products        all but matrix products without a batch (JAX's `dots_with_no_batch_dims_saveable`); for prices alone
"""

Ways = Mapping[str, str]
"""The way of each block that is recomputed, by its path; `*` stands for all blocks that are not named."""

KEPT = "none"
"""The way of a block of which nothing runs again."""

_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.linear.default")


def recomputed(captured: Captured, ways: Ways) -> Captured:
    """Return the program in which blocks of layers (children of module lists) are recomputed in backward.

    The joint graph is changed in place: `captured` must not be used afterwards.

    Raises:
        StalePlanError: a path names no block of this program, or a way does not exist.
    """
    plan = copies_of(captured.graph, ways)
    _copy_nodes(captured, plan)
    return dataclasses.replace(captured, graph=recomputed_graph(captured.graph, ways))


def blocks_of(graph: Graph) -> list[str]:
    """Return the paths of the blocks that can be recomputed, in the order they run."""
    return list(dict.fromkeys(block_of(op) for op in graph.ops if _repeats(op)))


def block_of(op: Op) -> str:
    """Return the path of the layer an operator belongs to: its module path up to the first number; empty if none."""
    return layer_path(op.module)


def copies_of(
    graph: Graph,
    way: Way | Ways = "full",
    *,
    redraws: bool = False,
    parts: bool = False,
    outside: Way | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return the forward operators to run again, in order, by the backward operator before which they run.

    With one way, that is the way of all blocks. For prices alone: `redraws`: random values are drawn again, from the
    generator's state that was kept, instead of being kept themselves; `parts`: what a kernel of a whole norm, gated
    activation or rotation never writes runs again besides, as it does inside such kernels' backward; `outside`: the
    way of what is in no block, as the loss.
    """
    chosen = _chosen(graph, way) if isinstance(way, str) else _chosen_by_block(graph, way)
    if parts:
        chosen |= _inside_parts(graph)
    again = [op for op in graph.ops if op.name in chosen and _repeats(op, redraws=redraws)]
    if outside is not None:
        free = _chosen(graph, outside)
        again += [op for op in graph.ops if op.name in free and not block_of(op) and _runs(op, redraws=redraws)]
    forward = {op.name: block_of(op) for op in again}
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
    order = {block: sorted(names, key=graph.position.__getitem__) for block, names in wanted.items()}
    return {first[block]: tuple(names) for block, names in order.items()}


def recomputed_graph(
    graph: Graph,
    way: Way | Ways = "full",
    *,
    redraws: bool = False,
    parts: bool = False,
    outside: Way | None = None,
) -> Graph:
    """Return the graph with the copies in it; equal layers' copies are as equal as they. See `copies_of`."""
    plan = copies_of(graph, way, redraws=redraws, parts=parts, outside=outside)
    needed = {name for names in plan.values() for name in names}
    if way == "whole":
        plan = _to_their_ends(graph, plan)
    again = {name for names in plan.values() for name in names}
    of_block: dict[str, set[str]] = {}
    for name in again:
        of_block.setdefault(block_of(graph.by_name[name]), set()).add(name)
    ops: list[Op] = []
    for op in graph.ops:
        for name in plan.get(op.name, ()):
            copied = graph.by_name[name]
            ops.append(_renamed(copied, of_block[block_of(copied)]))
        ops.append(_reading_copies(op, needed) if op.phase == "backward" else op)
    fold = dict(graph.fold)
    copied_first: dict[str, str] = {}
    for name in sorted(again, key=graph.position.__getitem__):
        rep = graph.representative(name)
        if way == "whole":  # what nobody reads has no layout of its own to decide
            fold[name + SUFFIX] = rep
        elif (first := copied_first.setdefault(rep, name)) != name:
            fold[name + SUFFIX] = first + SUFFIX
    if way == "whole":
        return dataclasses.replace(graph, ops=tuple(ops), fold=fold)
    return dataclasses.replace(graph, ops=tuple(ops), fold=_congruent(tuple(ops), fold))


def _repeats(op: Op, *, redraws: bool = False) -> bool:
    """Return whether an operator may run again: a forward call in a block whose values are not drawn at random."""
    return bool(block_of(op)) and _runs(op, redraws=redraws)


def _runs(op: Op, *, redraws: bool) -> bool:
    return op.kind == "call" and op.phase == "forward" and (redraws or not _is_random(op))


def _to_their_ends(graph: Graph, plan: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the plan with every forward call of each block in it."""
    calls: dict[str, list[str]] = {}
    for op in graph.ops:
        if op.kind == "call" and op.phase == "forward" and block_of(op):
            calls.setdefault(block_of(op), []).append(op.name)
    return {anchor: tuple(calls[block_of(graph.by_name[names[0]])]) for anchor, names in plan.items()}


def _chosen_by_block(graph: Graph, ways: Ways) -> frozenset[str]:
    """Return the same where blocks have ways of their own."""
    known = blocks_of(graph)
    unknown = [path for path in ways if path != "*" and path not in known]
    if unknown:
        shown = f"{known[0]} to {known[-1]}" if known else "none"
        raise StalePlanError(
            f"the plan recomputes {unknown[0]}, which is no block of this program ({shown}); plan again for this model"
        )
    chosen: dict[str, frozenset[str]] = {KEPT: frozenset()}
    for way in {*ways.values()} - {KEPT}:
        match way:
            case "full" | "whole" | "casts" | "cheap" | "selective" | "per_operator" | "keep_attention":
                chosen[way] = _chosen(graph, way)
            case _:
                raise StalePlanError(
                    f"the plan recomputes by {way!r}; known are none, casts, cheap, selective, per_operator, "
                    "keep_attention and full"
                )
    every = ways.get("*", KEPT)
    return frozenset(op.name for op in graph.ops if op.name in chosen[ways.get(block_of(op), every)])


def _chosen(graph: Graph, way: Way) -> frozenset[str]:
    """Return the operators that run again if they are needed and may; views always do, they cost nothing."""
    if way in {"full", "whole"}:
        return frozenset(op.name for op in graph.ops)
    casts = _casts(graph)
    if way == "casts":
        return casts
    if way == "selective":
        return casts | _attention_core(graph)
    if way == "cheap":
        return frozenset(op.name for op in graph.ops if not computes(op))
    if way == "products":
        return frozenset(op.name for op in graph.ops if op.target not in _PRODUCTS)
    if way == "keep_attention":
        return frozenset(op.name for op in graph.ops if not is_attention(op))
    kept: set[str] = set()
    seen: dict[str, int] = {}
    for op in graph.ops:
        block = block_of(op)
        if op.target in _PRODUCTS and op.phase == "forward":
            seen[block] = seen.get(block, 0) + 1
            if seen[block] % 2 == 0:
                kept.add(op.name)
        elif is_attention(op):
            kept.add(op.name)
    return frozenset(op.name for op in graph.ops if op.name not in kept)


def _casts(graph: Graph) -> frozenset[str]:
    """Return what makes parameters of other types, and their views."""
    found: set[str] = set()
    for op in graph.ops:
        if op.kind == "call" and op.name in parameter_like(graph) and (not is_view(op) or op.refs[0].op in found):
            found.add(op.name)
    return frozenset(found)


def _inside_parts(graph: Graph) -> frozenset[str]:
    """Return what neither computes nor is read by what computes, through views or not."""
    read: set[str] = set()
    for op in reversed(graph.ops):
        if op.name in read and is_view(op):
            read.add(op.refs[0].op)
        elif computes(op):
            read.update(ref.op for ref in op.refs)
    return frozenset(op.name for op in graph.ops if op.name not in read and not computes(op))


def _attention_core(graph: Graph) -> frozenset[str]:
    """Return attention's kernels, and what makes scores [..., s, s]: the product, and all of its size that follows."""
    scores: dict[str, int] = {}
    for op in graph.ops:
        if op.kind != "call" or op.phase != "forward":
            continue
        size = _size(op)
        made = op.target == "aten.bmm.default" and op.outputs[0] is not None and _is_square(op.outputs[0].shape)
        if made or any(scores.get(ref.op, -1) == size for ref in op.refs):
            scores[op.name] = size
    return frozenset(scores) | {op.name for op in graph.ops if is_attention(op)}


def _size(op: Op) -> int:
    meta = op.outputs[0] if op.outputs else None
    return math.prod(meta.shape) if meta is not None else 0


def _is_square(shape: tuple[int, ...]) -> bool:
    return len(shape) > 2 and shape[-1] == shape[-2]


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
    """Return the fold among operators that read copies in the same places: of some layers all, of others none."""
    found: dict[str, str] = {}
    first: dict[tuple[str, tuple[bool, ...]], str] = {}
    for op in ops:
        place = (fold.get(op.name, op.name), tuple(ref.op.endswith(SUFFIX) for ref in op.refs))
        if (rep := first.setdefault(place, op.name)) != op.name:
            found[op.name] = rep
    return found


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
