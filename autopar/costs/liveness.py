"""How long values live, and what one device holds at a moment as a function of the decisions.

A value lives from the operator that makes it to its last reader, through views
of it, which own nothing. Gradients of parameters live to the end; what is reduced over ranks to become one, until that
is waited for. Parameters, optimizer state and the batch, which the caller holds, live throughout. A redistributed copy
lives from the first to the last reader that shares it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.costs.clusters import Cluster
from autopar.costs.narrowing import kept_narrow
from autopar.costs.optimizer import state_bytes
from autopar.ir.graph import Graph, Op, once_per_graph
from autopar.ir.placement import Layout, Partial, local_shape
from autopar.ir.reshard import AHEAD_BYTES
from autopar.ir.roles import base_of, gradient_values
from autopar.ir.table import Floats, MemoryRow
from autopar.ir.tensor import TensorMeta


@dataclass(frozen=True, slots=True)
class Life:
    """When one value of one instance is held: positions, both inclusive."""

    op: str
    index: int
    first: int
    last: int
    if_whole: bool = False
    """Whether only a value that is no term of a sum over ranks is held."""

    share: float = 1.0
    """What is held, over the bytes of the value: less than all of one that was cast to a narrower type."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Bytes that go with the redistributed copies of one group at other times than the copies' own."""

    bytes: Floats
    """[source layouts, demanded layouts] of one instance; below zero where something is held less."""

    lives: tuple[tuple[int, int, int], ...]
    """Of each instance: where the copy is made, and the positions, both inclusive, from and to which it holds them."""


@dataclass(frozen=True, slots=True)
class CopyLife:
    """When the redistributed copies of one group exist, and how large they are."""

    lives: tuple[tuple[int, int], ...]
    bytes: Floats
    """[source layouts, demanded layouts] of one instance."""

    of_parameter: bool = False
    """Whether what is copied is a parameter: the same in all micro-batches."""

    beside: tuple[Beside, ...] = ()
    """What the copies, or their making, take or save apart from the copies themselves."""

    early: tuple[tuple[int, int], ...] = ()
    """The lives where the program issues gathers ahead by a rule of its own (`prefetched`); empty of other copies."""


@once_per_graph
def _last_read(graph: Graph) -> dict[tuple[str, int], int]:
    """Return the position of the last operator that reads each value, itself or a view of it."""
    base = base_of(graph)
    return {base[ref.op, ref.index]: position for position, op in enumerate(graph.ops) for ref in op.refs}


@once_per_graph
def lives(graph: Graph) -> list[Life]:
    """Return how long each value that owns memory lives; parameters and buffers are left out."""
    end = len(graph.ops)
    base = base_of(graph)
    last = dict(_last_read(graph))
    for output in graph.outputs:
        if output.ref is not None:
            last[base[output.ref.op, output.ref.index]] = end
    written = written_into(graph)
    found = []
    for position, op in enumerate(graph.ops):
        if op.kind in {"parameter", "buffer"}:
            continue
        held = op.kind in {"input", "constant"}
        first = 0 if held else position
        for index, meta in enumerate(op.outputs):
            if meta is not None and base[op.name, index] == (op.name, index):
                until = end if held else last.get((op.name, index), position)
                until -= (op.name, index) in written
                found.append(Life(op.name, index, first, until))
    return [part for life in found for part in _parts(graph, life)]


def _parts(graph: Graph, life: Life) -> list[Life]:
    """Return the lives of a value and of what linear layers cast it to and keep in its stead."""
    narrow = kept_narrow(graph).get((life.op, life.index)) if graph.keeps_narrow else None
    if narrow is None:
        return [life]
    cast = replace(life, first=narrow.first, last=narrow.last, share=narrow.share)
    return [replace(life, last=narrow.read_until), cast]


_INTO_FIRST = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar",
        "neg.default", "exp.default", "log.default", "sqrt.default", "rsqrt.default", "reciprocal.default",
        "abs.default",
        "sin.default", "cos.default", "erf.default", "tanh.default", "sigmoid.default", "relu.default", "silu.default",
        "gelu.default", "hardtanh.default", "leaky_relu.default", "elu.default", "pow.Tensor_Scalar", "clamp.default",
        "masked_fill.Scalar", "_log_softmax.default",
    )
)  # fmt: skip
_INTO_SCORES = "autopar_ops.cross_entropy_backward.default"
_INTO_SECOND = frozenset({"aten.add.Tensor", "aten.mul.Tensor"})
_INTO_ANY = frozenset(
    f"aten.{name}_backward.default"
    for name in (
        "threshold",
        "tanh",
        "sigmoid",
        "gelu",
        "silu",
        "hardtanh",
        "leaky_relu",
        "elu",
        "softplus",
        "hardswish",
    )
)
"""Operators that the rewriter lets write into a value that nobody reads again (`rewrite.inplace.ComputeIntoDead`)."""


@once_per_graph
def written_into(graph: Graph) -> frozenset[tuple[str, int]]:
    """Return the values whose last reader writes its result into their memory, which is then no longer theirs."""
    base = base_of(graph)
    last: dict[tuple[str, int], int] = {}
    for position, op in enumerate(graph.ops):
        for ref in op.refs:
            last[base[ref.op, ref.index]] = position
    kept = {base[o.ref.op, o.ref.index] for o in graph.outputs if o.ref is not None}
    found: set[tuple[str, int]] = set()
    for position, op in enumerate(graph.ops):
        ways = len(op.refs) if op.target in _INTO_ANY else 2 if op.target in _INTO_SECOND else op.target in _INTO_FIRST
        owners = [base[ref.op, ref.index] for ref in op.refs]
        into = list(zip(op.refs, owners, strict=True))
        for ref, owner in into[1:2] if op.target == _INTO_SCORES else into[: int(ways)]:
            whole = graph.by_name[owner[0]].outputs[owner[1]]
            maker = graph.by_name[owner[0]]
            # What forward saves is held by autograd until backward is done, which may be asked for twice.
            own = maker.kind == "call" and maker.phase == op.phase and last[owner] == position and owner not in kept
            alike = whole is not None and graph.meta(ref) == op.outputs[0] and whole.nbytes == graph.meta(ref).nbytes
            if own and alike and owners.count(owner) == 1:
                found.add(owner)
                break
    return frozenset(found)


@once_per_graph
def gradients_of(graph: Graph) -> frozenset[tuple[str, int]]:
    """Return the values whose memory holds a gradient that the program returns, perhaps as a view of it."""
    base = base_of(graph)
    found = (o.ref for o in graph.outputs if o.kind == "gradient" and o.ref is not None)
    return frozenset(base[ref.op, ref.index] for ref in found)


@once_per_graph
def makers_of_gradients(graph: Graph) -> frozenset[str]:
    """Return the operators that make these values."""
    return frozenset(name for name, _ in gradients_of(graph))


def gradient_indices(graph: Graph, op: Op) -> tuple[int, ...]:
    """Return which outputs of an operator are parameters' gradients, or are as memory."""
    returned = gradients_of(graph)
    return tuple(index for index in range(len(op.outputs)) if (op.name, index) in returned)


_ADD_THEMSELVES = frozenset({"aten.mm.default", "aten.bmm.default"})
"""Operators that programs let add to a gradient's sum: the gradient is nowhere by itself (`runtime.summing`)."""


def lives_of_step(graph: Graph, *, accumulates: bool) -> list[Life]:
    """Return how long values live in a step.

    Gradients that add up over micro-batches are there from the start, and beside them that of one micro-batch which is
    being added, but for products, which add themselves. A micro-batch's own outputs end with its forward: of all
    together, `held.output_bytes` tells.
    """
    if not accumulates:
        return lives(graph)
    base = base_of(graph)
    returned = {base[o.ref.op, o.ref.index] for o in graph.outputs if o.ref is not None and o.kind == "output"}
    forward_end = max((at for at, op in enumerate(graph.ops) if op.phase == "forward"), default=0)
    other = {base[o.ref.op, o.ref.index] for o in graph.outputs if o.ref is not None and o.kind != "gradient"}
    summed, read = gradients_of(graph) - other, _last_read(graph)
    found = []
    for each in lives(graph):
        key = (each.op, each.index)
        if key in summed and graph.by_name[each.op].target in _ADD_THEMSELVES:
            found.append(replace(each, first=0))
        elif key in summed:
            found += [replace(each, last=max(each.first, read.get(key, 0))), replace(each, first=0)]
        elif key in returned and each.first > 0:
            found.append(replace(each, last=max(forward_end, read.get(key, 0))))
        else:
            found.append(each)
    return found


def settled_behind(made: Sequence[tuple[int, float]], end: int) -> dict[int, int]:
    """Return, for each (position, bytes) in order, the position at which as many bytes are made behind it.

    None is settled before those ahead of it; those behind which too little is made are at the end.
    """
    found: dict[int, int] = {}
    latest = 0
    for index, (at, own) in enumerate(made):
        behind, reached = 0.0, end
        for then, other in made[index + 1 :]:
            behind += other
            if behind >= own:
                reached = then
                break
        found[at] = latest = max(latest, reached)
    return found


@once_per_graph
def settled_at(graph: Graph) -> dict[str, int]:
    """Return, for each operator whose value becomes a gradient, the position at which its reduction is waited for.

    That is where gradients of as many bytes are made behind it, and their reductions issued: the rule of the rewriter's
    `SettleScatters`. Of what is cast or viewed to become a gradient, it is that of the gradient.
    """
    made: dict[int, int] = {}
    for name, index in sorted(gradients_of(graph)):
        meta = graph.by_name[name].outputs[index]
        made[graph.position[name]] = made.get(graph.position[name], 0) + (0 if meta is None else meta.nbytes)
    until = settled_behind(sorted(made.items()), len(graph.ops))
    found = {graph.ops[at].name: then for at, then in until.items()}
    ends = gradient_values(graph)
    makers = {ref.op for ref in ends}
    for op in reversed(graph.ops):
        if op.name in makers and op.name not in found:
            users = (graph.by_name[user] for user in graph.users[op.name])
            reached = [found[each.name] for each in users if each.name in found and not ends.isdisjoint(each.refs)]
            if reached:
                found[op.name] = max(reached)
    return found


def settled(graph: Graph) -> list[Life]:
    """Return how long values live in a step of one micro-batch: terms of gradients until their sum is there."""
    found = []
    returned, until = gradients_of(graph), settled_at(graph)
    for life in lives(graph):
        if (life.op, life.index) in returned and until[life.op] < life.last:
            found += [replace(life, last=until[life.op]), replace(life, first=until[life.op] + 1, if_whole=True)]
        else:
            found.append(life)
    return found


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


def is_term(layout: Layout | None) -> bool:
    """Return whether a value in this layout is a term of a sum, or the like, over some ranks."""
    return layout is not None and any(isinstance(placement, Partial) for placement in layout)


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
            steps[life.first] += life.share * meta.nbytes
            steps[life.last + 1] -= life.share * meta.nbytes
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

    workspaces: Mapping[str, Floats] = field(default_factory=dict)
    """By representative operator and option of its node, what it holds while it runs."""

    def __post_init__(self) -> None:
        self.lives = lives_of_step(self.graph, accumulates=self.accumulates)
        self.own_lives = self.lives if self.accumulates else settled(self.graph)
        self._resting = self._resting_bytes()

    def _resting_bytes(self) -> dict[int, Floats]:
        resting: dict[int, Floats] = {}
        instances = self.graph.instances
        for node, cluster in enumerate(self.clusters):
            op = self.graph.by_name[cluster.members[0]]
            if op.kind in {"parameter", "buffer"}:
                resting[node] = len(instances[op.name]) * self.resting_bytes(node)
        return resting

    def resting_bytes(self, node: int) -> Floats:
        """Return, by option, what one instance of a node's parameter and its optimizer state take."""
        op = self.graph.by_name[self.clusters[node].members[0]]
        return self._per_option(node, op, 0, with_state=op.requires_grad)

    def value_bytes(self, rep: str, index: int) -> Floats:
        """Return, by option of its node, what one value of an operator takes."""
        return self._per_option(self.home[rep], self.graph.by_name[rep], index)

    def workspace(self, at: int) -> tuple[int, Floats] | None:
        """Return the node of the operator at a position, and what that holds while it runs, by the node's options."""
        if at >= len(self.graph.ops):
            return None
        rep = self.graph.representative(self.graph.ops[at].name)
        return (self.home[rep], self.workspaces[rep]) if rep in self.workspaces else None

    def _lives_of(self, copy: CopyLife) -> tuple[tuple[int, int], ...]:
        """Return when the copies of a group exist: of a step of one micro-batch, the plan says what is issued ahead."""
        return copy.early if self.accumulates and copy.early else copy.lives

    def _whole(self, node: int, rep: str, index: int) -> Floats:
        """Return, by option, 1 where a value is no term of a sum over ranks, else 0."""
        cluster = self.clusters[node]
        layouts = (cluster.strategy(rep, k).outputs[index] for k in range(len(cluster.options)))
        return np.array([float(not is_term(layout)) for layout in layouts])

    def _per_option(self, node: int, op: Op, index: int, *, with_state: bool = False) -> Floats:
        meta, cluster = op.outputs[index], self.clusters[node]
        if meta is None:
            return np.zeros(len(cluster.options))
        layouts = [cluster.strategy(op.name, k).outputs[index] for k in range(len(cluster.options))]
        state = [
            state_bytes(op, at, self.sizes, self.optimizer) if with_state and at is not None else 0.0 for at in layouts
        ]
        held: Floats = np.array([local_bytes(meta, at, self.sizes) for at in layouts]) + np.array(state)
        return held

    def row(self, at: int) -> MemoryRow:
        """Return what one device holds while the operator at position `at` runs."""
        alive: dict[tuple[str, int, bool], float] = defaultdict(float)
        for life in self.own_lives:
            if life.first <= at <= life.last:
                alive[self.graph.representative(life.op), life.index, life.if_whole] += life.share
        nodes = {node: held.copy() for node, held in self._resting.items()}
        for (rep, index, if_whole), count in alive.items():
            node = self.home[rep]
            held = count * self._per_option(node, self.graph.by_name[rep], index)
            held = held * self._whole(node, rep, index) if if_whole else held
            nodes[node] = nodes[node] + held if node in nodes else held
        working = self.workspace(at)
        if working is not None:
            node, held = working
            nodes[node] = nodes[node] + held if node in nodes else held
        groups: dict[int, Floats] = {}
        for number, copy in enumerate(self.copies):
            held = sum(first <= at <= last for first, last in self._lives_of(copy)) * copy.bytes
            for beside in copy.beside:
                held = held + sum(first <= at <= last for _, first, last in beside.lives) * beside.bytes
            if held.any():
                groups[number] = held
        return MemoryRow(at, self.reserved_bytes, nodes, groups)

    def curve(self, options: Sequence[int], copies: Sequence[set[tuple[int, int]]]) -> Floats:
        """Return what one device holds at each position, given each node's option and each group's copies."""
        steps = np.zeros(len(self.graph.ops) + 2)
        steps[0] = self.reserved_bytes + sum(held[options[node]] for node, held in self._resting.items())
        size: dict[tuple[str, int], float] = {}
        for life in self.own_lives:
            key = (self.graph.representative(life.op), life.index)
            node = self.home[key[0]]
            layout = self.clusters[node].strategy(key[0], options[node]).outputs[life.index]
            if key not in size:
                meta = self.graph.by_name[key[0]].outputs[life.index]
                size[key] = local_bytes(meta, layout, self.sizes) if meta is not None else 0.0
            if life.if_whole and is_term(layout):
                continue
            steps[life.first] += life.share * size[key]
            steps[life.last + 1] -= life.share * size[key]
        for rep, working in self.workspaces.items():
            held = working[options[self.home[rep]]]
            for op in self.graph.instances[rep]:
                steps[self.graph.position[op.name]] += held
                steps[self.graph.position[op.name] + 1] -= held
        for copy, pairs in zip(self.copies, copies, strict=True):
            held = sum(copy.bytes[pair] for pair in pairs)
            if held:
                for first, last in self._lives_of(copy):
                    steps[first] += held
                    steps[last + 1] -= held
            for beside in copy.beside:
                held = sum(beside.bytes[pair] for pair in pairs)
                for _, first, last in beside.lives if held else ():
                    steps[first] += held
                    steps[last + 1] -= held
        return np.cumsum(steps)[: len(self.graph.ops) + 1]
