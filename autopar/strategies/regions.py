"""Parts of a program inside which an axis that follows the batch or its tokens is free to do otherwise.

    follows ... | view  transpose  attention  transpose  view | ... follows

A region is what surrounds some operators, its seeds, up to those that use parameters of their own: there all
strategies are offered, and the search decides where inside it tensors change hands.
"""

from __future__ import annotations

from collections.abc import Collection

from autopar.ir.graph import Graph, Op, once_per_graph
from autopar.ir.roles import gradient_like, parameter_like


def region(graph: Graph, seeds: Collection[str]) -> frozenset[str]:
    """Return the representatives of the operators around `seeds` (of all that these names stand for), these included.

    Reached from seeds by what they read and make, not through operators that read trained parameters or make their
    gradients, nor through sums with what is not reached: residual streams go on as they are.
    """
    bounds = _with_parameters(graph)
    left = [op.name for op in graph.ops if op.name in seeds or graph.representative(op.name) in seeds]
    found = set(left)
    while left:
        op = graph.by_name[left.pop()]
        for near in (*(ref.op for ref in op.refs), *graph.users[op.name]):
            if near in found or near in bounds or not _joins(graph.by_name[near], found):
                continue
            found.add(near)
            left.append(near)
    return frozenset(graph.representative(name) for name in found)


def _joins(op: Op, found: Collection[str]) -> bool:
    """Return whether an operator can belong to a region with what is `found` of it."""
    return op.kind == "call" and (op.target != "aten.add.Tensor" or all(ref.op in found for ref in op.refs))


@once_per_graph
def _with_parameters(graph: Graph) -> frozenset[str]:
    """Return the operators that are, read or make gradients of trained parameters."""
    trained = trained_like(graph)
    gradients = gradient_like(graph)
    leaving = {each.ref.op for each in graph.outputs if each.kind == "gradient" and each.ref is not None}
    return frozenset(
        op.name
        for op in graph.ops
        if op.name in trained or op.name in gradients or op.name in leaving or any(ref.op in trained for ref in op.refs)
    )


@once_per_graph
def trained_like(graph: Graph) -> frozenset[str]:
    """Return the trained parameters, and what only reshapes or casts one of them."""
    found: set[str] = set()
    starts = parameter_like(graph)
    for op in graph.ops:
        trained = op.kind == "parameter" and op.requires_grad
        if op.name in starts and (trained or any(ref.op in found for ref in op.refs)):
            found.add(op.name)
    return frozenset(found)


def parameters_read(graph: Graph, op: Op) -> tuple[int, ...]:
    """Return which of the tensors that an operator reads are trained parameters, perhaps reshaped or cast."""
    trained = trained_like(graph)
    return tuple(slot for slot, ref in enumerate(op.refs) if ref.op in trained)
