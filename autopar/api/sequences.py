"""Which ranks may split the tokens of a sample, where there are fewer samples than ranks, and how evenly."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from autopar.costs.segments import weight
from autopar.ir.graph import Graph, Op, once_per_graph
from autopar.ir.placement import Shard
from autopar.strategies.attention import RULES as ATTENTION
from autopar.strategies.call import Call
from autopar.strategies.following import token_count


def splits_tokens(graph: Graph, size: int) -> bool:
    """Return whether the tokens of each sample, and attention, divide into so many equal parts."""
    counts = [token_count(graph, op.outputs[0]) for op in graph.ops if op.kind == "input" and op.outputs]
    if not any(counts) or any(count % size for count in counts):
        return False
    return all(split_dims(graph, op, size) for op in _attention(graph))


def share_of_tokens(graph: Graph, tokens: int, width: int) -> float:
    """Return about what is left of a sample's work on `width` ranks where `tokens` times as many split its tokens.

    Attention is split by heads, which tensor parallelism splits first, or by queries if no mask depends on them; by
    neither, it is whole on each rank.
    """
    if tokens == 1:
        return 1.0
    total, left = _work(graph), 0.0
    for op in _attention(graph):
        heads = graph.meta(op.refs[0]).shape[1]
        divides = 2 in split_dims(graph, op, tokens) or heads // gcd(width, heads) % tokens == 0
        repeated = len(graph.instances[op.name])
        left += 0.0 if divides else repeated * weight(graph, op) * (1.0 - 1.0 / tokens)
    return 1.0 / tokens + left / max(total, 1.0)


def _attention(graph: Graph) -> Iterator[Op]:
    """Yield the attention kernels, of equal layers the first."""
    return (op for op in graph.ops if op.target in ATTENTION and graph.representative(op.name) == op.name)


def split_dims(graph: Graph, op: Op, size: int) -> set[int]:
    """Return the dims of a kernel's queries that so many ranks may split, but for samples."""
    # The gradient of the result is what backward kernels read first, and has the dims of queries.
    offered = ATTENTION[op.target](Call(op, tuple(graph.meta(ref) for ref in op.refs), size, ()))
    return {each.inputs[0].dim for each in offered if isinstance(each.inputs[0], Shard)} - {0}


@once_per_graph
def _work(graph: Graph) -> float:
    return sum(weight(graph, op) for op in graph.ops)
