"""Time cut into segments of about equal work, so that overlap is priced where it can happen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.costs.operators import flops
from autopar.ir.graph import Graph, Op, once_per_graph
from autopar.ir.table import Floats

_FORWARD, _BACKWARD = 6, 8
"""Segments of a phase. Hiding a gradient's reduction is priced to about one part in eight of the backward pass."""

_BYTES_PER_FLOP = 1 / 16
"""Weight of an operator's bytes beside its FLOPs when segments are cut; only the cuts depend on it, no price does."""


@dataclass(frozen=True)
class Segments:
    """Which segment each operator runs in; those of the forward phase come first."""

    forward: int
    total: int
    of_op: Mapping[str, int]

    @classmethod
    def of(cls, graph: Graph) -> Segments:
        """Return the segments of a program."""
        return _segments(graph)

    def counts(self, instances: Sequence[Op]) -> Floats:
        """Return how many of the instances run in each segment."""
        row = np.zeros(self.total)
        for op in instances:
            row[self.of_op[op.name]] += 1
        return row


def weight(graph: Graph, op: Op) -> float:
    """Return about how long an operator runs beside others, in FLOPs: for cutting, not for pricing."""
    if op.kind != "call":
        return 0.0
    metas = [graph.meta(ref) for ref in op.refs]
    moved = sum(meta.nbytes for meta in (*metas, *op.outputs) if meta is not None)
    return flops(op, metas) + moved / _BYTES_PER_FLOP


@once_per_graph
def _segments(graph: Graph) -> Segments:
    weights = {op.name: weight(graph, op) for op in graph.ops}
    has_backward = any(op.phase == "backward" for op in graph.ops)
    of_op: dict[str, int] = {}
    for phase, first, count in (("forward", 0, _FORWARD), ("backward", _FORWARD, _BACKWARD)):
        ops = [op for op in graph.ops if op.phase == phase]
        whole = sum(weights[op.name] for op in ops) or 1.0
        done = 0.0
        for op in ops:
            of_op[op.name] = first + min(count - 1, math.floor(count * done / whole))
            done += weights[op.name]
    return Segments(_FORWARD, _FORWARD + (_BACKWARD if has_backward else 0), of_op)
