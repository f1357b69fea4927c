"""Causal attention of which every rank has positions from both ends of a sequence: context parallelism, balanced."""

from __future__ import annotations

import dataclasses

from autopar.ir.graph import BALANCED, Graph, Op
from autopar.ir.roles import is_attention


def balanced_positions(graph: Graph) -> Graph:
    """Return the graph in which query positions of causal attention may be split over ranks, keys gathered.

    Each rank then has chunk i from the start and chunk i from the end, and with them as many scores as any other
    (Megatron-Core, torchtitan, Llama 3). For prices alone: no program of ours says a kernel which positions it has.
    """
    return dataclasses.replace(graph, ops=tuple(_balanced(op) for op in graph.ops))


def _balanced(op: Op) -> Op:
    if not is_attention(op):
        return op
    args = tuple(BALANCED if arg is True else arg for arg in op.args)
    kwargs = tuple((name, BALANCED if value is True else value) for name, value in op.kwargs)
    return dataclasses.replace(op, args=args, kwargs=kwargs)
