"""What operators read, and which strided shards of it they would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Graph, Op, Ref, once_per_graph
from autopar.ir.placement import Shard
from autopar.ir.strategy import Strategy
from autopar.ir.tensor import TensorMeta


@once_per_graph
def calls_of(graph: Graph) -> dict[str, tuple[tuple[TensorMeta, ...], tuple[tuple[str, int], ...]]]:
    """Return, of each representative call, what it reads: metas and values."""
    found = {}
    for rep, (op, *_) in graph.instances.items():
        if op.kind == "call":
            values = tuple((graph.representative(ref.op), ref.index) for ref in op.refs)
            found[rep] = tuple(map(graph.meta, op.refs)), values
    return found


def signature(graph: Graph, op: Op) -> object:
    """Return what equal calls have in common, in this and other programs."""
    return op.target, _shape_of_args(op), tuple(map(graph.meta, op.refs)), op.outputs


Strided = tuple[tuple[Strategy, ...], frozenset[tuple[int, Shard]]]
"""Strategies, and which strided shards they take in which slots: remembered by the identity of the former."""


def _strided(strategies: tuple[Strategy, ...]) -> Strided:
    placed = ((slot, each) for strategy in strategies for slot, each in enumerate(strategy.inputs))
    return strategies, frozenset((slot, each) for slot, each in placed if isinstance(each, Shard) and each.outer > 1)


def wanted_shards(
    graph: Graph, reps: Sequence[Op], found: Mapping[str, tuple[Strategy, ...]], known: dict[int, Strided]
) -> dict[tuple[str, int], frozenset[Shard]]:
    """Return the strided shards of each value that its readers take, where its producer does not offer them.

    A fused projection is split within each of its parts, which only what cuts it apart knows. `known` is filled with
    what strategies take, and keeps them: most are the same when it is asked again.
    """
    wanted: dict[tuple[str, int], set[Shard]] = {}
    sources = _sources(graph)
    for rep, strategies in found.items():
        if id(strategies) not in known:
            known[id(strategies)] = _strided(strategies)
        for slot, each in known[id(strategies)][1]:
            for source in sources[rep][slot]:
                wanted.setdefault(source, set()).add(each)
    for op in reps:
        for index in range(len(op.outputs)):
            if (op.name, index) in wanted:
                wanted[op.name, index] -= {s.outputs[index] for s in found[op.name] if s.outputs[index]}
    calls = {op.name for op in reps if op.kind == "call"}
    return {key: frozenset(shards) for key, shards in wanted.items() if shards and key[0] in calls}


@once_per_graph
def _sources(graph: Graph) -> dict[str, list[set[tuple[str, int]]]]:
    """Return what the operators that a representative stands for read in each slot, by its own representative."""
    found: dict[str, list[set[tuple[str, int]]]] = {}
    for rep, instances in graph.instances.items():
        found[rep] = [set() for _ in instances[0].refs]
        for op in instances:
            for slot, ref in enumerate(op.refs):
                found[rep][slot].add((graph.representative(ref.op), ref.index))
    return found


def _shape_of_args(op: Op) -> object:
    """Return the arguments with references reduced to their position, so that equal calls compare equal."""

    def strip(arg: object) -> object:
        if isinstance(arg, Ref):
            return "ref"
        return tuple(map(strip, arg)) if isinstance(arg, tuple) else (type(arg).__name__, arg)

    return (strip(op.args), tuple((key, strip(value)) for key, value in op.kwargs))
