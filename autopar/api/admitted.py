"""Degrees that a program must admit: `ep` needs experts, `cp` tokens and attention that heads or queries divide."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from autopar.api.sequences import split_dims
from autopar.costs.moves import roots_of
from autopar.errors import InfeasibleError, UsageError
from autopar.ir.graph import Graph, Op
from autopar.ir.placement import Shard
from autopar.ir.strategy import MeshStrategy
from autopar.search.meshes import Candidate
from autopar.strategies.attention import RULES as ATTENTION
from autopar.strategies.embedding import LOOKUPS
from autopar.strategies.experts import experts
from autopar.strategies.following import token_count


def require_admitted(graph: Graph, fixed: Mapping[str, int]) -> None:
    """Check that experts and tokens divide by the degrees that are asked for.

    Raises:
        InfeasibleError: they do not divide.
        UsageError: the program has no experts, or reads no sequences.
    """
    if fixed.get("ep", 1) > 1:
        _require_experts(graph, fixed["ep"])
    if fixed.get("cp", 1) > 1:
        _require_tokens(graph, fixed["cp"])


def splits_tensors(graph: Graph, size: int) -> bool:
    """Return whether ranks that split tensors have parts of most matrices: of half of all their elements at least.

    Of 3 or 9 ranks, as GPUs in racks of 72 may be asked for, most would do what every other does.
    """
    metas = [op.outputs[0] for op in graph.ops if op.kind == "parameter" and op.outputs]
    shapes = [meta.shape for meta in metas if meta is not None and len(meta.shape) > 1]
    # Of a convolution channels are split, never its window.
    split = [shape for shape in shapes if any(dim % size == 0 for dim in shape[: 3 if len(shape) < 4 else 2])]
    return 2 * sum(map(prod, split)) >= sum(map(prod, shapes))


def looks_up_most(graph: Graph) -> bool:
    """Return whether most of the parameters' elements are of tables that nothing but looks rows up in.

    Such a table is best split over all ranks and never gathered, however many there are: a rank looks its columns up
    for every sample, which is no more work than all columns for its own.
    """
    roots = roots_of(graph)
    read_by: dict[str, set[str]] = {}
    for op in graph.ops:
        for ref in op.refs:
            if ref.op in roots and op.name not in roots:
                read_by.setdefault(roots[ref.op], set()).add(op.target)
    numel = {
        op.name: op.outputs[0].numel
        for op in graph.ops
        if op.kind == "parameter" and op.outputs and op.outputs[0] is not None
    }
    tables = (name for name in numel if read_by.get(graph.representative(name), {""}) <= LOOKUPS)
    return 2 * sum(numel[name] for name in tables) > sum(numel.values())


def _require_experts(graph: Graph, size: int) -> None:
    counts = experts(graph).counts
    if not counts:
        largest = max((op for op in graph.ops if op.kind == "parameter"), key=_dims, default=None)
        shape = list(largest.outputs[0].shape) if largest is not None and largest.outputs[0] is not None else []
        has = f"; {largest.target}, {shape}, is used whole" if largest is not None and len(shape) > 2 else ""
        raise UsageError(
            f"--fix ep={size}: no parameter of the model has a dimension of experts, each multiplied with tokens of "
            f"its own (a batched or grouped product){has}; leave ep out, or use dp_shard or tp"
        )
    for name, count in counts.items():
        if count % size:
            raise InfeasibleError(
                f"--fix ep={size}: {name} holds {count} experts, which do not divide into {size} equal parts; "
                f"{_instead('ep', count)}"
            )


def _dims(op: Op) -> int:
    return len(op.outputs[0].shape) if op.outputs[0] is not None else 0


def _require_tokens(graph: Graph, size: int) -> None:
    counts = {op.name: token_count(graph, op.outputs[0]) for op in graph.ops if op.kind == "input" and op.outputs}
    read = {name: count for name, count in counts.items() if count}
    if not read:
        raise UsageError(f"--fix cp={size}: no input of the model has a batch and a sequence dimension; leave cp out")
    for name, count in read.items():
        if count % size:
            raise InfeasibleError(
                f"--fix cp={size}: input {graph.by_name[name].target} has {count} tokens a sample, which do not divide "
                f"into {size} equal parts; take a sequence that is a multiple of {size}, or "
                f"{_instead('cp', count)}"
            )


def require_split_attention(
    graph: Graph, candidate: Candidate, options: Mapping[str, tuple[MeshStrategy, ...]]
) -> None:
    """Check that attention is not whole on every rank of a `cp` axis for want of a split.

    Raises:
        InfeasibleError: neither heads nor samples divide, and query positions must stay together.
    """
    for place, axis in enumerate(candidate):
        if axis.role != "cp":
            continue
        for op in graph.ops:
            if op.target not in ATTENTION or graph.representative(op.name) != op.name:
                continue
            if not any(isinstance(s.axes[place].inputs[0], Shard) for s in options[op.name]):
                raise InfeasibleError(f"--fix cp={axis.size}: {op.where} {_whole(graph, op, axis.size)}")


def _whole(graph: Graph, op: Op, size: int) -> str:
    """Return why attention is whole on every rank of a `cp` axis, and what to do about it."""
    if split_dims(graph, op, size):
        read = [each.target for each in graph.ops if each.kind == "input" and token_count(graph, each.outputs[0])]
        return f"has no tokens of {', '.join(read)}, which are what cp splits; leave cp out, or use tp"
    heads, keys = (graph.meta(ref).shape[1] for ref in op.refs[:2])
    return (
        f"has {heads} query and {keys} key heads, of which neither those of keys nor the queries of each divide into "
        f"{size} equal parts, and causal attention or its mask keeps query positions together; "
        f"{_instead('cp', keys, heads // keys)}"
    )


def _instead(degree: str, *counts: int) -> str:
    """Return which degrees divide any of some counts."""
    found = [str(size) for size in range(2, max(counts) + 1) if any(count % size == 0 for count in counts)]
    told = " or ".join(found[:1] + found[-1:] if len(found) > 4 else found)
    return f"choose {degree} of {told}" if told else f"leave {degree} out"
