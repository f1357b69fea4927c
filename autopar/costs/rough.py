"""What a trial of the outer search takes, roughly: for trying likely ones first, not for choosing between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from autopar.costs.links import Links, Message
from autopar.costs.liveness import gradients_of, lives
from autopar.costs.optimizer import state_bytes
from autopar.costs.segments import weight
from autopar.ir.graph import Graph
from autopar.ir.roles import CASTS, parameter_like
from autopar.ir.stages import units
from autopar.ir.table import Floats
from cost_models.cluster import ClusterSpec


@dataclass(frozen=True)
class Shape:
    """The numbers of a trial."""

    depth: int
    microbatches: int
    replicas: int
    """Ranks along which the batch or its tokens are split."""

    shards: int
    """Of these, ranks along which parameters may be sharded at rest."""

    width: int
    """Ranks along which tensors are."""

    experts: int = 1
    """Of the ranks along which parameters may be sharded, those along which experts are split."""


@dataclass(frozen=True)
class Run:
    """What of a pipeline's schedule estimates read; that of 1F1B where nothing is said."""

    idle: float = 1.0
    """Micro-batches' seconds on one rank that a step is longer by, for each rank but one, than the work."""

    ahead: float = 0.0
    """Micro-batches that the first rank has in flight beyond one a rank."""

    rounds: int = 1
    """How often a micro-batch passes all ranks."""


class Taken(NamedTuple):
    """Seconds of a micro-batch through all stages; of what is done to parameters, as if nobody had a part of them."""

    own_s: float
    """What each rank does for its own samples, with their experts' gradients: no other can."""

    casts_s: float = 0.0
    """Casts of parameters, which ranks that shard these do each of its shards."""

    sums_s: float = 0.0
    """Casts and sums of gradients, which they do so too where these are scattered as they come."""

    experts_s: float = 0.0
    """Products of tokens with the experts that they were sent to, which make these parameters' gradients."""

    def times(self, each: Taken) -> Taken:
        """Return each part so many times as long."""
        return Taken(*(mine * factor for mine, factor in zip(self, each, strict=True)))

    def over(self, other: Taken) -> Taken:
        """Return how many times as long as of another each part is; 1 where that has none."""
        return Taken(*(mine / theirs if theirs else 1.0 for mine, theirs in zip(self, other, strict=True)))

    def towards(self, other: Taken, share: float) -> Taken:
        """Return what lies so far on the way to another, or beyond it."""
        return Taken(*(mine + share * (theirs - mine) for mine, theirs in zip(self, other, strict=True)))


def evenly(factor: float) -> Taken:
    """Return all parts so many times as long, for `Taken.times`."""
    return Taken(factor, factor, factor, factor)


@dataclass(frozen=True)
class Sharding:
    """What is sharded along the ranks that split the batch."""

    state: bool
    """Parameters at rest and the optimizer's state; parameters are gathered once a step."""

    parameters: bool
    """Parameters are gathered in each phase of each micro-batch."""

    gradients: bool
    """Each micro-batch's gradients are scattered, and their sums held so."""


_PLAIN = Run()
EARLY = Sharding(state=True, parameters=True, gradients=True)
_SHARDINGS = (
    Sharding(state=False, parameters=False, gradients=False),
    Sharding(state=True, parameters=False, gradients=False),
    Sharding(state=True, parameters=True, gradients=False),
    EARLY,
)
"""From what communicates least to what holds least."""


@dataclass(frozen=True)
class Rough:
    """Sizes of a whole program on one device."""

    graph: Graph
    cluster: ClusterSpec
    optimizer: str
    of_experts: frozenset[str] = frozenset()
    """Names of the parameters that are experts', which ranks along which these are split hold in parts."""

    exchanged_bytes: float = 0.0
    """What experts are sent of all samples, whole; as much comes back, and both again in backward."""

    _links: dict[tuple[int, ...], Links] = field(init=False, compare=False, default_factory=dict)
    """Of meshes that were asked about."""

    @cached_property
    def work(self) -> float:
        """Return about how much the program computes, in FLOPs."""
        return sum(weight(self.graph, op) for op in self.graph.ops)

    @cached_property
    def _parameter_bytes(self) -> float:
        metas = (op.outputs[0] for op in self.graph.ops if op.kind == "parameter")
        return float(sum(meta.nbytes for meta in metas if meta is not None))

    @cached_property
    def _share_of_experts(self) -> float:
        """Return which share of all parameters experts have."""
        made = ((op.outputs[0], op.target in self.of_experts) for op in self.graph.ops if op.kind == "parameter")
        return sum(meta.nbytes for meta, theirs in made if meta is not None and theirs) / max(
            1.0, self._parameter_bytes
        )

    def _whole(self, amount: float, shape: Shape) -> float:
        """Return what a rank has, or does, of all parameters, where these are not sharded: of experts, its own."""
        theirs = self._share_of_experts
        return amount * (1.0 - theirs + theirs / shape.experts)

    @cached_property
    def _gradient_bytes(self) -> float:
        return self._bytes_of(gradients_of(self.graph))

    @cached_property
    def _gathered_bytes(self) -> float:
        """Return what parameters are as they are gathered: cast first, where they are cast to a smaller type."""
        root: dict[str, str] = {}
        least: dict[str, float] = {}
        for op in self.graph.ops:
            meta = op.outputs[0] if op.outputs else None
            if op.name not in parameter_like(self.graph) or op.kind == "buffer" or meta is None:
                continue
            if op.kind == "parameter":
                root[op.name], least[op.name] = op.name, meta.nbytes
            elif op.refs[0].op in root:
                root[op.name] = start = root[op.refs[0].op]
                whole = self.graph.by_name[start].outputs[0]
                if op.target in CASTS and whole is not None:
                    least[start] = min(least[start], whole.nbytes * meta.item_bytes / whole.item_bytes)
        return sum(least.values())

    @cached_property
    def _term_bytes(self) -> float:
        """Return what micro-batches' gradients are as they are reduced: before they are cast to a larger type."""
        found = 0.0
        for name, index in gradients_of(self.graph):
            op, metas = self.graph.by_name[name], [self.graph.by_name[name].outputs[index]]
            while op.kind == "call" and op.target in CASTS:
                metas.append(self.graph.meta(op.refs[0]))
                op = self.graph.by_name[op.refs[0].op]
            found += min((meta.nbytes for meta in metas if meta is not None), default=0)
        return found

    @cached_property
    def _state_bytes(self) -> float:
        trained = (op for op in self.graph.ops if op.kind == "parameter" and op.requires_grad)
        return sum(state_bytes(op, (), (), self.optimizer) for op in trained)

    @cached_property
    def _saved_bytes(self) -> float:
        """Return what forward saves for backward, and what a block makes of it again, of all samples."""
        casts = parameter_like(self.graph)
        return self._bytes_of({each for each in self._saved if each[0] not in casts})

    @cached_property
    def _cast_bytes(self) -> float:
        """Return the bytes of parameters in other types that forward saves, as large for few samples as for many."""
        casts = parameter_like(self.graph)
        return self._bytes_of({each for each in self._saved if each[0] in casts})

    @cached_property
    def _passing_bytes(self) -> float:
        """Return what is alive at most beyond what forward saves, of all samples: logits and their gradient, say."""
        return max(0.0, float(self._alive_bytes.max()) - self._saved_bytes)

    @cached_property
    def _working_bytes(self) -> float:
        """Return the same of all blocks but the last, which has the logits."""
        *most, last = units(self.graph)
        at = [self.graph.position[name] for unit in most or [last] for name in unit.ops]
        return max(0.0, float(self._alive_bytes[at].max(initial=0.0)) - self._saved_bytes)

    @cached_property
    def _alive_bytes(self) -> Floats:
        """Return what is alive at each operator, of all samples."""
        graph, casts, returned = self.graph, parameter_like(self.graph), gradients_of(self.graph)
        steps = np.zeros(len(graph.ops) + 2)
        for life in lives(graph):
            meta = graph.by_name[life.op].outputs[life.index]
            passes = graph.by_name[life.op].kind == "call" and life.op not in casts
            if meta is not None and passes and (life.op, life.index) not in returned:
                steps[life.first] += meta.nbytes
                steps[life.last + 1] -= meta.nbytes
        return np.asarray(np.cumsum(steps), dtype=np.float64)

    @cached_property
    def _saved(self) -> frozenset[tuple[str, int]]:
        ops = self.graph.ops
        return frozenset(
            (life.op, life.index)
            for life in lives(self.graph)
            if self.graph.by_name[life.op].kind == "call"
            and self.graph.by_name[life.op].phase == "forward"
            and life.last < len(ops)
            and ops[life.last].phase == "backward"
        )

    def _bytes_of(self, values: Collection[tuple[str, int]]) -> float:
        metas = (self.graph.by_name[name].outputs[index] for name, index in values)
        return float(sum(meta.nbytes for meta in metas if meta is not None))

    @cached_property
    def blocks(self) -> int:
        """Return between how many blocks the program may be cut."""
        return len(units(self.graph))

    @cached_property
    def _unit_works(self) -> tuple[float, ...]:
        graph = self.graph
        return tuple(sum(weight(graph, graph.by_name[name]) for name in unit.ops) for unit in units(graph))

    @cached_property
    def _largest_bytes(self) -> tuple[float, float]:
        """Return the bytes of the largest parameter, of experts and of all others, as it is gathered."""
        made = {op.target: op.outputs[0] for op in self.graph.ops if op.kind == "parameter"}
        sizes = {name: meta.nbytes for name, meta in made.items() if meta is not None}
        theirs, others = (
            max((size for name, size in sizes.items() if (name in self.of_experts) == of_experts), default=0)
            for of_experts in (True, False)
        )
        smaller = self._gathered_bytes / max(1.0, self._parameter_bytes)
        return theirs * smaller, others * smaller

    def busiest_share(self, depth: int) -> float:
        """Return which share of the work the busiest of `depth` stages has at least: 60 of 96 layers, two of them."""
        return busiest_share(self._unit_works, depth)

    def least_bytes(self, shape: Shape, sharding: Sharding = EARLY, run: Run = _PLAIN) -> float:
        """Return about what the first or last pipeline rank holds if all that can be split is, in even stages."""
        parts = shape.microbatches * shape.replicas * shape.width
        theirs, others = self._largest_bytes
        # A parameter is whole while something is computed with it, of experts that of one's own.
        whole = max(theirs / shape.experts, others) / shape.width if sharding.parameters else 0.0
        first = self._held(shape, min(shape.depth + run.ahead, shape.microbatches), sharding)
        last = self._held(shape, 1, sharding)
        return whole + max(first + self._working_bytes / parts, last + self._passing_bytes / parts)

    def mean_bytes(self, shape: Shape) -> float:
        """Return what the average rank of a pipeline holds at least, whatever the layouts and the cut."""
        return self._held(shape, 1, EARLY)

    def _held(self, shape: Shape, in_flight: float, sharding: Sharding) -> float:
        own = shape.depth * shape.width
        shards = shape.shards if sharding.state else 1
        static = self._parameter_bytes + self._state_bytes
        static = (static / shards if sharding.state else self._whole(static, shape)) / own
        if sharding.state and not sharding.parameters:
            static += self._whole(self._cast_bytes or self._parameter_bytes, shape) / own
        # Without micro-batches, gradients come when what was saved has gone.
        sums = self._gradient_bytes / shape.shards if sharding.gradients else self._whole(self._gradient_bytes, shape)
        static += sums / own if shape.microbatches > 1 else 0.0
        parts = shape.microbatches * shape.replicas * shape.width * shape.depth
        kept = sharding.state and not sharding.parameters  # what is gathered once is cast once
        casts = 0.0 if kept else self._cast_bytes * in_flight / (own * shards)
        return static + casts + self._saved_bytes * in_flight / parts + float(self.cluster.device.reserved_bytes)

    def share_over(self, shape: Shape, least: Rough, budget_bytes: float) -> float:
        """Return how much of what `least` saves of memory is needed to fit, from 0 to 1.

        `least` are the sizes of the same program with all its blocks recomputed.
        """
        held, thrifty = self.least_bytes(shape), least.least_bytes(shape)
        return min(1.0, max(0.0, held - budget_bytes) / max(held - thrifty, 1.0))

    def estimates_s(
        self, shape: Shape, microbatch: Taken, budget_bytes: float, runs: Sequence[Run] = (_PLAIN,)
    ) -> list[float]:
        """Return about how long a step takes in each run, given a micro-batch through all stages on one replica.

        Infinite where not even the thriftiest layouts fit.
        """
        if self.least_bytes(shape) > budget_bytes:
            return [inf] * len(runs)
        exchanges_s, found = self._exchanges_s(shape), [inf] * len(runs)
        for sharding in _SHARDINGS:
            fits = [self.least_bytes(shape, sharding, run) <= budget_bytes for run in runs]
            if any(fits):
                each = self._steps_s(shape, exchanges_s + self._spent_s(shape, microbatch, sharding), sharding, runs)
                found = [min(known, s) if fit else known for known, s, fit in zip(found, each, fits, strict=True)]
        return found

    def _spent_s(self, shape: Shape, microbatch: Taken, sharding: Sharding) -> float:
        """Return what a micro-batch takes on a rank that shares parameters and gradients with others."""
        shared = sharding.gradients or (sharding.state and shape.microbatches == 1)
        casts_s, sums_s = (
            taken / shape.shards if apart else self._whole(taken, shape)
            for taken, apart in ((microbatch.casts_s, sharding.state), (microbatch.sums_s, shared))
        )
        return microbatch.own_s + microbatch.experts_s + casts_s + sums_s

    def _steps_s(self, shape: Shape, microbatch_s: float, sharding: Sharding, runs: Sequence[Run]) -> list[float]:
        """Return a step's seconds by each run: collectives go by blocks, or all in one behind which nothing is left.

        That one holds whatever it gathers whole. With micro-batches, what is gathered and scattered goes one by one.
        """
        if shape.microbatches > 1:
            return self._steps_by_s(shape, microbatch_s, sharding, runs, self._matrices)
        found = self._steps_by_s(shape, microbatch_s, sharding, runs, (self.blocks, self.blocks))
        if sharding.parameters:
            return found
        return list(map(min, found, self._steps_by_s(shape, microbatch_s, sharding, runs, (0, 0))))

    def _steps_by_s(
        self, shape: Shape, microbatch_s: float, sharding: Sharding, runs: Sequence[Run], calls: tuple[int, int]
    ) -> list[float]:
        """Return the same by so many calls of all stages, and of experts' parameters; 0: by one of each stage."""
        # Sums over micro-batches are reduced when all are there; gradients of each, or of the only one, as they come.
        comes = sharding.gradients or shape.microbatches == 1
        reduced_bytes = self._term_bytes if comes else self._gradient_bytes
        op = "reduce_scatter" if sharding.state else "all_reduce"
        by = (0, 0) if op == "all_reduce" and shape.microbatches > 1 else calls
        reduce_s, hidable_s = self._moved_s(shape, reduced_bytes, op, by)
        times = shape.microbatches if comes else 0
        behind_s, hidable_s, reduce_s = times * reduce_s, times * hidable_s, 0.0 if comes else reduce_s
        if sharding.state:
            once = self._moved_s(shape, self._gathered_bytes, "all_gather", calls)
            times = 2 * shape.microbatches if sharding.parameters else 1
            behind_s, hidable_s = behind_s + times * once[0], hidable_s + times * once[1]
        if not any(calls):
            hidable_s = 0.0
        busy = shape.microbatches * microbatch_s * self.busiest_share(shape.depth)
        # Ranks that share cores are faster while others wait; but all their work has to be done on these cores.
        share, work_s = self.cluster.share, shape.microbatches * microbatch_s / shape.depth
        bubbles = [run.idle * microbatch_s * (shape.depth - 1) / shape.depth for run in runs]
        shown_s = behind_s - hidable_s + reduce_s
        return [max(work_s, share * (busy + bubble_s), hidable_s + share * bubble_s) + shown_s for bubble_s in bubbles]

    def _moved_s(self, shape: Shape, nbytes: float, op: str, calls: tuple[int, int]) -> tuple[float, float]:
        """Return the seconds to reduce all gradients, or to gather all parameters, and how many of them can hide.

        Gradients are reduced along ranks that may share parameters first, and what these are left with along others.
        """
        own, theirs = shape.depth * shape.width, self._share_of_experts if shape.experts > 1 else 0.0
        across = shape.replicas // shape.shards
        taken = hidable = 0.0
        for share, experts, all_calls in ((1.0 - theirs, 1, calls[0]), (theirs, shape.experts, calls[1])):
            links = self._links_of(shape.depth, across, shape.shards // experts, experts * shape.width)
            mine, times = share * nbytes / (own * experts), max(1.0, all_calls / shape.depth)
            messages = [Message(op, 2, round(mine / times))]
            if op != "all_gather":
                left = mine * experts / shape.shards if op == "reduce_scatter" else mine
                messages.append(Message("all_reduce", 1, round(left / times)))
            taken += times * sum(map(links.message_s, messages))
            hidable += times * sum(map(links.hidable_s, messages))
        return taken, hidable

    def _links_of(self, *sizes: int) -> Links:
        if sizes not in self._links:
            self._links[sizes] = Links(self.cluster, sizes)
        return self._links[sizes]

    @cached_property
    def _matrices(self) -> tuple[int, int]:
        """Return how many parameters of several dimensions there are, and how many of these are experts'."""
        metas = [(op.outputs[0], op.target in self.of_experts) for op in self.graph.ops if op.kind == "parameter"]
        found = [theirs for meta, theirs in metas if meta is not None and len(meta.shape) > 1]
        return len(found), sum(found)

    def _exchanges_s(self, shape: Shape) -> float:
        """Return what a micro-batch's tokens take on their ways to experts and back, in both passes."""
        if shape.experts == 1:
            return 0.0
        shards = shape.shards // shape.experts
        across = shape.replicas // shape.shards
        links = self._links_of(shape.depth, across, shards, shape.experts, shape.width)
        sent = self.exchanged_bytes / (shape.microbatches * shape.replicas * shape.width)
        return 4.0 * links.message_s(Message("all_to_all", 3, round(sent)))


@lru_cache
def busiest_share(works: Sequence[float], parts: int) -> float:
    """Return the least share of all work that the busiest of `parts` consecutive groups can have.

    The work of a single group is found by bisection: how many groups of at most so much are needed.
    """
    low, high = max(*works, sum(works) / parts), sum(works)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _groups(works, middle) <= parts else (middle, high)
    return high / max(sum(works), 1e-30)


def _groups(works: Sequence[float], most: float) -> int:
    """Return into how many consecutive groups of at most `most` works are cut, each as long as can be."""
    groups, held = 1, 0.0
    for work in works:
        if held + work > most:
            groups, held = groups + 1, 0.0
        held += work
    return groups
