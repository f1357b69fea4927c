"""Which parameters are experts': the leading dimension of their products with tokens counts experts, not features.

    bmm          [e, t, k] [e, k, n] -> [e, t, n]
    grouped_mm   [t, k] [e, k, n], ends of each expert's tokens [e] -> [t, n]

That follows from the operators that read a parameter, whatever its module is called. An axis of role `expert` splits
such parameters by experts, and follows the batch everywhere but around these products.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op, Ref, once_per_graph
from autopar.ir.placement import Partial, Shard
from autopar.ir.roles import gradient_like
from autopar.ir.strategy import Strategy
from autopar.ir.tensor import TensorMeta
from autopar.strategies.expert_rows import on_rows_of_experts
from autopar.strategies.factories import RULES as BLANK
from autopar.strategies.matmul import RULES as PRODUCTS
from autopar.strategies.moe import RULES as GROUPED
from autopar.strategies.regions import parameters_read, region

_SPLIT = Shard(0)
_BATCHED = frozenset({"aten.bmm.default", "aten.baddbmm.default"}) & PRODUCTS.keys()


@dataclass(frozen=True)
class Experts:
    """The experts of a program, empty where it has none."""

    counts: Mapping[str, int]
    """How many experts each of their parameters holds, by the parameter's name, in the program's order."""

    parameters: frozenset[str]
    """The operators that are such a parameter, perhaps reshaped or cast."""

    products: Mapping[str, tuple[int, ...]]
    """Which of the tensors that a product with such parameters reads are these."""

    gradients: frozenset[str]
    """The operators that make these parameters' gradients, and those that pass them on."""

    around: frozenset[str]
    """Representatives of the operators between and around the products."""


@once_per_graph
def experts(graph: Graph) -> Experts:
    """Return the experts of a program."""
    chains: set[str] = set()
    products: dict[str, tuple[int, ...]] = {}
    for op in graph.ops:
        slots = [slot for slot in parameters_read(graph, op) if _counts_experts(graph, op, slot)]
        found = {slot: chain for slot in slots if (chain := _chain(graph, op.refs[slot]))}
        if found:
            products[op.name] = tuple(found)
            chains.update(*found.values())
    parameters = {name for name in chains if graph.by_name[name].kind == "parameter"}
    counts = {op.target: _leading(op.outputs[0]) for op in graph.ops if op.name in parameters}
    gradients = _gradients(graph, parameters)
    seeds = {*products, *gradients}
    return Experts(counts, frozenset(chains), products, gradients, region(graph, seeds) if seeds else frozenset())


def sent_to_experts(graph: Graph) -> float:
    """Return the bytes of all tokens that forward brings to experts, as often as they take it: once a layer."""
    known = experts(graph)
    behind: set[str] = set()
    sent: dict[Ref, int] = {}
    for op in graph.ops:
        if op.phase != "forward":
            continue
        inside = graph.representative(op.name) in known.around and any(ref.op in behind for ref in op.refs)
        if op.name in known.products:
            tokens = [ref for slot, ref in enumerate(op.refs) if slot not in known.products[op.name]]
            sent |= {ref: graph.meta(ref).nbytes for ref in tokens[:1] if ref.op not in behind}
        if inside or op.name in known.products:
            behind.add(op.name)
    return float(sum(sent.values()))


def _counts_experts(graph: Graph, op: Op, slot: int) -> bool:
    """Return whether an operator multiplies each of the leading parts of a tensor with tokens of its own."""
    ranks = tuple(len(graph.meta(ref).shape) for ref in op.refs)
    if op.target in GROUPED:
        return slot == 1 and ranks[:3] == (2, 3, 1)
    return op.target in _BATCHED and slot >= len(ranks) - 2 and _leading(graph.meta(op.refs[slot])) > 1


def _leading(meta: TensorMeta | None) -> int:
    return meta.shape[0] if meta is not None and meta.shape else 0


def _chain(graph: Graph, ref: Ref) -> tuple[str, ...]:
    """Return the operators from a value back to its parameter, if all of them keep its leading dimension."""
    count, names = _leading(graph.meta(ref)), [ref.op]
    while graph.by_name[names[-1]].kind == "call":
        names.append(graph.by_name[names[-1]].refs[0].op)
    kept = all(_leading(graph.by_name[name].outputs[0]) == count for name in names)
    return tuple(names) if kept and count > 1 else ()


def _gradients(graph: Graph, parameters: set[str]) -> frozenset[str]:
    """Return the operators that make parameters' gradients, and those through which they leave."""
    ends = gradient_like(graph)
    left = [each.ref.op for each in graph.outputs if each.kind == "gradient" and each.name in parameters and each.ref]
    found: set[str] = set()
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        op = graph.by_name[name]
        if name in ends and not _multiplies(op):
            left += [ref.op for ref in op.refs]
    return frozenset(found)


def _multiplies(op: Op) -> bool:
    return op.target in PRODUCTS or op.target in GROUPED


def by_experts(
    graph: Graph, found: Mapping[str, tuple[Strategy, ...]], kept: Mapping[str, tuple[Strategy, ...]]
) -> dict[str, tuple[Strategy, ...]]:
    """Return the strategies along an axis that splits experts, given all and those that follow the batch.

    Experts' parameters are in parts at rest and where they are read, tokens come to them; their gradients are made
    in parts or as terms. Around them values may be split by experts, whole or terms, too; elsewhere is what was `kept`.
    """
    known = experts(graph)
    left = dict(kept)
    for name in known.parameters:
        rep = graph.representative(name)
        left[rep] = tuple(s for s in found[rep] if s.outputs[0] == _SPLIT)
    for name, slots in known.products.items():
        rep = graph.representative(name)
        left[rep] = tuple(s for s in found[rep] if all(s.inputs[slot] == _SPLIT for slot in slots))
    for name in known.gradients:
        rep, last = graph.representative(name), len(graph.by_name[name].outputs) - 1
        options = left[rep] if name in known.products else found[rep]
        left[rep] = tuple(s for s in options if s.outputs[last] in {_SPLIT, Partial()}) or options
    more = on_rows_of_experts(graph, found, _tokens(graph, known))
    seeds = {graph.representative(name) for name in (*known.products, *known.gradients)}
    split = _split_by_experts(graph, found, left, seeds, known.around)
    for name in known.around - seeds:
        others = (s for s in found[name] if all(p in split.get(value, ()) for value, p in _shards(graph, name, s)))
        left[name] = tuple(dict.fromkeys((*kept[name], *others)))
    return left | {name: (*left[name], *each) for name, each in more.items()}


def _tokens(graph: Graph, known: Experts) -> dict[str, dict[int, int]]:
    """Return which tensors that grouped products with experts read are tokens, and in which dimension."""
    found: dict[str, dict[int, int]] = {}
    for name in (*known.products, *known.gradients):
        op = graph.by_name[name]
        if op.target in GROUPED:
            ranks = tuple(len(graph.meta(ref).shape) for ref in op.refs)
            of = {(2, 3, 1): {0: 0}, (2, 2, 1): {0: 1, 1: 0}, (2, 3, 1, 2): {0: 0, 3: 0}}
            found[name] = of.get(ranks, {})
    return found


_Value = tuple[str, int]


def _split_by_experts(
    graph: Graph,
    found: Mapping[str, tuple[Strategy, ...]],
    left: Mapping[str, tuple[Strategy, ...]],
    seeds: Set[str],
    around: Set[str],
) -> dict[_Value, set[Shard]]:
    """Return how values around the products (`seeds`, with what is `left` to them) are split where it is by experts.

    That is how a product wants or makes them, and what an operator makes of such a split, or makes it of; operators
    that only look at shapes tell nothing.
    """
    split: dict[_Value, set[Shard]] = {}
    for name in seeds:
        for strategy in left[name]:
            for value, placement in _shards(graph, name, strategy):
                if placement == _SPLIT:
                    split.setdefault(value, set()).add(placement)
    telling = [name for name in around - seeds if graph.by_name[name].target not in BLANK]
    grown = True
    while grown:
        grown = False
        for name in telling:
            for strategy in found[name]:
                shards = _shards(graph, name, strategy)
                reached = [p in split.get(value, ()) for value, p in shards]
                if any(reached) and not all(reached):
                    grown = True
                    for value, placement in shards:
                        split.setdefault(value, set()).add(placement)
    return split


def _shards(graph: Graph, name: str, strategy: Strategy) -> list[tuple[_Value, Shard]]:
    """Return the values that a strategy reads and makes in parts, by operator and output."""
    op = graph.by_name[name]
    read = (((graph.representative(ref.op), ref.index), p) for ref, p in zip(op.refs, strategy.inputs, strict=True))
    made = (((name, index), p) for index, p in enumerate(strategy.outputs))
    return [(value, p) for value, p in (*read, *made) if isinstance(p, Shard)]
