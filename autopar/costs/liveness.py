"""How long values live, and what one device holds at a moment as a function of the decisions.

A value lives from the operator that makes it to its last reader, through views
of it, which own nothing. Gradients of parameters live to the end. Parameters,
optimizer state and the batch, which the caller holds, live throughout. A redistributed copy lives from the first
to the last reader that shares it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costs.clusters import Cluster
from autopar.costs.optimizer import state_bytes
from autopar.ir.graph import Graph, Op, once_per_graph
from autopar.ir.placement import Layout, local_shape
from autopar.ir.reshard import AHEAD_BYTES
from autopar.ir.roles import is_view
from autopar.ir.table import Floats, MemoryRow
from autopar.ir.tensor import TensorMeta


@dataclass(frozen=True, slots=True)
class Life:
    """When one value of one instance is held: positions, both inclusive."""

    op: str
    index: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class CopyLife:
    """When the redistributed copies of one group exist, and how large they are."""

    lives: tuple[tuple[int, int], ...]
    bytes: Floats
    """[source layouts, demanded layouts] of one instance."""

    of_parameter: bool = False
    """Whether what is copied is a parameter: the same in all micro-batches."""

    tail: Floats | None = None
    """Likewise, held from the first moment of a life to the end of the program: what a scattered sum leaves behind."""


@once_per_graph
def base_of(graph: Graph) -> dict[tuple[str, int], tuple[str, int]]:
    """Return, for each value, the value whose memory it shares (itself, if it is no view)."""
    base: dict[tuple[str, int], tuple[str, int]] = {}
    for op in graph.ops:
        for index in range(len(op.outputs)):
            own = (op.name, index)
            if op.kind == "call" and is_view(op) and op.refs:
                ref = op.refs[0]
                base[own] = base[ref.op, ref.index]
            else:
                base[own] = own
    return base


@once_per_graph
def lives(graph: Graph) -> list[Life]:
    """Return how long each value that owns memory lives; parameters and buffers are left out."""
    end = len(graph.ops)
    base = base_of(graph)
    last: dict[tuple[str, int], int] = {}
    for position, op in enumerate(graph.ops):
        for ref in op.refs:
            last[base[ref.op, ref.index]] = position
    for output in graph.outputs:
        if output.ref is not None:
            last[base[output.ref.op, output.ref.index]] = end
    found = []
    for position, op in enumerate(graph.ops):
        if op.kind in {"parameter", "buffer"}:
            continue
        held = op.kind in {"input", "constant"}
        first = 0 if held else position
        for index, meta in enumerate(op.outputs):
            if meta is not None and base[op.name, index] == (op.name, index):
                until = end if held else last.get((op.name, index), position)
                found.append(Life(op.name, index, first, until))
    return found


@once_per_graph
def gradients_of(graph: Graph) -> frozenset[tuple[str, int]]:
    """Return the values whose memory holds a gradient that the program returns, perhaps as a view of it."""
    base = base_of(graph)
    found = (o.ref for o in graph.outputs if o.kind == "gradient" and o.ref is not None)
    return frozenset(base[ref.op, ref.index] for ref in found)


def gradient_indices(graph: Graph, op: Op) -> tuple[int, ...]:
    """Return which outputs of an operator are parameters' gradients, or are as memory."""
    returned = gradients_of(graph)
    return tuple(index for index in range(len(op.outputs)) if (op.name, index) in returned)


def lives_of_step(graph: Graph, *, accumulates: bool) -> list[Life]:
    """Return how long values live in a step.

    Gradients that add up over micro-batches are there from the start, and those of one micro-batch beside them until it
    ends: they are added when all of it is computed.
    """
    if not accumulates:
        return lives(graph)
    summed = gradients_of(graph)
    return [*lives(graph), *(replace(each, first=0) for each in lives(graph) if (each.op, each.index) in summed)]


def prefetched(gathers: Sequence[tuple[int, int, float]]) -> list[int]:
    """Return, for each gather of a parameter in one phase, the position at which it is issued.

    A gather is (position of its first reader, of its last, bytes). Programs issue each before the use of the one ahead
    of it, and earlier while what is gathered ahead fits `ir.reshard.AHEAD_BYTES`: the rule of the rewriter's
    `PrefetchGathers`.
    """
    order = sorted(range(len(gathers)), key=lambda i: gathers[i][0])
    issued = [first for first, _, _ in gathers]
    for place in range(1, len(order)):
        target = place - 1
        ahead = gathers[order[place]][2] + gathers[order[target]][2]
        while target > 0 and ahead + gathers[order[target - 1]][2] <= AHEAD_BYTES:
            target -= 1
            ahead += gathers[order[target]][2]
        issued[order[place]] = gathers[order[target]][0]
    return issued


def local_bytes(meta: TensorMeta, layout: Layout | None, sizes: tuple[int, ...]) -> float:
    """Return the bytes of a tensor that one device holds."""
    return 0.0 if layout is None else float(math.prod(local_shape(meta.shape, layout, sizes)) * meta.item_bytes)


def least_peak_bytes(graph: Graph, world_size: int, optimizer: str) -> float:
    """Return bytes that some device holds at the peak whatever is decided: everything split over all devices."""
    steps = np.zeros(len(graph.ops) + 2)
    for op in graph.ops:
        if op.kind in {"parameter", "buffer"} and op.outputs[0] is not None:
            trained = op.kind == "parameter" and op.requires_grad
            steps[0] += op.outputs[0].nbytes + (state_bytes(op, (), (), optimizer) if trained else 0.0)
    for life in lives(graph):
        meta = graph.by_name[life.op].outputs[life.index]
        if meta is not None:
            steps[life.first] += meta.nbytes
            steps[life.last + 1] -= meta.nbytes
    return float(np.cumsum(steps).max() / world_size)


@dataclass
class Holdings:
    """Memory of one program on one mesh, by position."""

    graph: Graph
    clusters: Sequence[Cluster]
    home: dict[str, int]
    sizes: tuple[int, ...]
    optimizer: str
    copies: Sequence[CopyLife] = ()
    reserved_bytes: float = 0.0
    accumulates: bool = False
    """Whether gradients are added up over micro-batches, and so held from the start."""

    def __post_init__(self) -> None:
        self.lives = lives_of_step(self.graph, accumulates=self.accumulates)
        self._resting = self._resting_bytes()

    def _resting_bytes(self) -> dict[int, Floats]:
        resting: dict[int, Floats] = {}
        count = Counter(self.graph.representative(op.name) for op in self.graph.ops)
        for node, cluster in enumerate(self.clusters):
            op = self.graph.by_name[cluster.members[0]]
            if op.kind == "parameter":
                resting[node] = count[op.name] * self.resting_bytes(node)
        return resting

    def resting_bytes(self, node: int) -> Floats:
        """Return, by option, what one instance of a node's parameter and its optimizer state take."""
        op = self.graph.by_name[self.clusters[node].members[0]]
        return self._per_option(node, op, 0, with_state=op.requires_grad)

    def value_bytes(self, rep: str, index: int) -> Floats:
        """Return, by option of its node, what one value of an operator takes."""
        return self._per_option(self.home[rep], self.graph.by_name[rep], index)

    def _per_option(self, node: int, op: Op, index: int, *, with_state: bool = False) -> Floats:
        meta, cluster = op.outputs[index], self.clusters[node]
        if meta is None:
            return np.zeros(len(cluster.options))
        layouts = [cluster.strategy(op.name, k).outputs[index] for k in range(len(cluster.options))]
        state = [state_bytes(op, at, self.sizes, self.optimizer) if with_state and at else 0.0 for at in layouts]
        held: Floats = np.array([local_bytes(meta, at, self.sizes) for at in layouts]) + np.array(state)
        return held

    def row(self, at: int) -> MemoryRow:
        """Return what one device holds while the operator at position `at` runs."""
        alive = Counter(
            (self.graph.representative(life.op), life.index) for life in self.lives if life.first <= at <= life.last
        )
        nodes = {node: held.copy() for node, held in self._resting.items()}
        for (rep, index), count in alive.items():
            node = self.home[rep]
            held = count * self._per_option(node, self.graph.by_name[rep], index)
            nodes[node] = nodes[node] + held if node in nodes else held
        groups: dict[int, Floats] = {}
        for number, copy in enumerate(self.copies):
            now = sum(first <= at <= last for first, last in copy.lives)
            begun = sum(first <= at for first, _ in copy.lives) if copy.tail is not None else 0
            held = now * copy.bytes + (begun * copy.tail if copy.tail is not None else 0.0)
            if held.any():
                groups[number] = held
        return MemoryRow(at, self.reserved_bytes, nodes, groups)

    def curve(self, options: Sequence[int], copies: Sequence[set[tuple[int, int]]]) -> Floats:
        """Return what one device holds at each position, given each node's option and each group's copies."""
        steps = np.zeros(len(self.graph.ops) + 2)
        steps[0] = self.reserved_bytes + sum(held[options[node]] for node, held in self._resting.items())
        size: dict[tuple[str, int], float] = {}
        for life in self.lives:
            key = (self.graph.representative(life.op), life.index)
            if key not in size:
                node = self.home[key[0]]
                layout = self.clusters[node].strategy(key[0], options[node]).outputs[life.index]
                meta = self.graph.by_name[key[0]].outputs[life.index]
                size[key] = local_bytes(meta, layout, self.sizes) if meta is not None else 0.0
            steps[life.first] += size[key]
            steps[life.last + 1] -= size[key]
        for copy, pairs in zip(self.copies, copies, strict=True):
            held = sum(copy.bytes[pair] for pair in pairs)
            if held:
                for first, last in copy.lives:
                    steps[first] += held
                    steps[last + 1] -= held
            kept = sum(copy.tail[pair] for pair in pairs) if copy.tail is not None else 0.0
            if kept:
                for first, _ in copy.lives:
                    steps[first] += kept
        return np.cumsum(steps)[: len(self.graph.ops) + 1]
