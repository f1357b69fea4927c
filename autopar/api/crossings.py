"""What crosses between the blocks of a program, and what it costs to send it from one pipeline rank to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import NamedTuple

from autopar.api.places import Places
from autopar.costs.links import Message
from autopar.costs.liveness import local_bytes
from autopar.costs.outcome import Outcome
from autopar.ir.graph import Graph, Op
from autopar.ir.roles import base_of
from autopar.ir.schedule import PipelineSchedule
from autopar.search.assignments import Order
from autopar.search.cuts import Cut
from autopar.search.fluid import Handing
from autopar.search.stages import Boundary
from cost_models.cluster import ClusterSpec
from cost_models.collectives import collective_s, host_s
from cost_models.topology import Hop, axis_hops


class Way(NamedTuple):
    """Link levels between ranks of a pipeline, inner to outer."""

    busy: tuple[Hop, ...]
    """While all ranks compute."""

    alone: tuple[Hop, ...]
    """As a rank finds them that has a core for itself."""


def levels(cluster: ClusterSpec, sizes: tuple[int, ...]) -> Way:
    """Return the link levels that the first axis of a mesh crosses, the stages of a pipeline."""
    busy = axis_hops(cluster.levels, sizes, 0)
    return Way(busy, axis_hops(cluster.alone.levels, sizes, 0) if cluster.share < 1.0 else busy)


def joining(whole: Way, one: int, other: int) -> Way:
    """Return the link levels between two blocks of ranks of a pipeline that crosses these."""
    inside = accumulate((hop.ranks for hop in whole.busy), mul)
    crossed = sum(one // ranks != other // ranks for ranks in inside)
    return Way(whole.busy[: crossed + 1], whole.alone[: crossed + 1])


def alive_between(graph: Graph, block_of: Mapping[str, int], blocks: int) -> list[list[tuple[Op, int]]]:
    """Return the values that are alive between neighbouring blocks: forward's, from parameters on."""
    base = base_of(graph)
    trained: set[str] = set()
    alive: list[list[tuple[Op, int]]] = [[] for _ in range(blocks - 1)]
    last: dict[tuple[str, int], int] = {}
    for op in graph.ops:
        if op.phase != "forward":
            continue
        if op.kind == "parameter" or any(ref.op in trained for ref in op.refs):
            trained.add(op.name)
        for ref in op.refs:
            key = base[ref.op, ref.index]
            last[key] = max(last.get(key, 0), block_of[op.name])
    for (name, index), end in last.items():
        op = graph.by_name[name]
        if op.kind == "call" and name in trained and op.outputs[index] is not None:
            for at in range(block_of[name], end):
                alive[at].append((op, index))
    return alive


def least_handing(cluster: ClusterSpec, depth: int, sizes: tuple[int, ...], nbytes: float) -> Handing:
    """Return what it takes at least to hand bytes from each rank of a pipeline to the next, however ranks are ordered.

    `sizes` are of a stage's mesh. Whoever passes all ranks leaves each group of those that a link level joins, but for
    the last, and so crosses a level further out as many times.
    """
    whole = levels(cluster, (depth, *sizes))
    steps, prices, handled = [depth - 1], [], []
    for outer in range(len(whole.busy)):
        hops = whole.busy[: outer + 1]
        called_s, _ = handled_s(cluster, nbytes, hops)
        prices.append(max(0.0, float(collective_s("point_to_point", nbytes, hops)) - called_s))
        handled.append(sum(handled_s(cluster, nbytes, whole.alone[: outer + 1])))
        steps.append(max(0, depth // prod(hop.ranks for hop in hops) - 1))
    prices = [min(prices[at:]) for at in range(len(prices))]
    path_s = sum(price * (more - fewer) for price, (more, fewer) in zip(prices, pairwise(steps), strict=True))
    return Handing(min(prices, default=0.0), prices[-1] if prices else 0.0, path_s, min(handled, default=0.0))


def handled_s(cluster: ClusterSpec, nbytes: float, hops: Sequence[Hop]) -> tuple[float, float]:
    """Return what a computing CPU core spends on the call and on the bytes of a message, sent or received.

    What `host_s` says of bytes is for each that is sent and another that is received.
    """
    if not nbytes or cluster.device.kind != "cpu":
        return 0.0, 0.0
    return max((hop.call_s for hop in hops), default=0.0), host_s("point_to_point", nbytes, hops) / 2


@dataclass
class Crossings:
    """The values between neighbouring blocks of a program that is solved on one stage's mesh."""

    outcome: Outcome
    places: Places
    block_of: Mapping[str, int]
    """Of every operator."""

    blocks: int
    _known: dict[Way, list[Boundary]] = field(init=False, default_factory=dict)
    _ways: dict[tuple[int, int], Way] = field(init=False, default_factory=dict)

    @cached_property
    def boundaries(self) -> list[Boundary]:
        """Return what crosses between neighbouring blocks, priced on the slowest link level that the pipeline crosses.

        Which level a boundary uses depends on the cut that is searched for.
        """
        return [self._boundary(held, self._longest) for held in self._bytes]

    def between(self, one: int, other: int) -> list[Boundary]:
        """Return what crosses, priced on the links between two blocks of ranks."""
        way = self._joining(one, other)
        if way not in self._known:
            self._known[way] = [self._boundary(held, way) for held in self._bytes]
        return self._known[way]

    def of_cut(self, cut: Cut, schedule: PipelineSchedule, order: Order) -> list[Boundary]:
        """Return the boundaries, those where stages of a cut end priced on the links between the stages' ranks."""
        found = list(self.boundaries)
        for stage, first in enumerate(cut.first_units[1:], start=1):
            one, other = (order[schedule.rank_of[each]] for each in (stage - 1, stage))
            found[first - 1] = self._boundary(self._bytes[first - 1], self._joining(one, other))
        return found

    def _joining(self, one: int, other: int) -> Way:
        """Return the link levels between two blocks of ranks."""
        if (one, other) not in self._ways:
            self._ways[one, other] = joining(self._levels(self.places.joining((one, other))), one, other)
        return self._ways[one, other]

    @cached_property
    def _longest(self) -> Way:
        """Return all link levels that the pipeline crosses."""
        return self._levels(self.outcome.links.cluster)

    def _levels(self, cluster: ClusterSpec) -> Way:
        """Return the link levels that the pipeline crosses on a cluster."""
        links = self.outcome.links
        return levels(cluster, (self.places.depth, *links.sizes[links.time_axes :]))

    @cached_property
    def _bytes(self) -> list[int]:
        """Return what of one micro-batch is alive between neighbouring blocks."""
        graph, sizes = self.outcome.graph, self.outcome.links.sizes

        def held(op: Op, index: int) -> float:
            meta = op.outputs[index]
            layout = self.outcome.strategy(graph.representative(op.name)).outputs[index]
            return local_bytes(meta, layout, sizes) if meta is not None else 0.0

        alive = alive_between(graph, self.block_of, self.blocks)
        return [round(sum(held(op, index) for op, index in values)) for values in alive]

    def _boundary(self, nbytes: int, way: Way) -> Boundary:
        """Return what crosses some link levels, priced: transfers while all compute, the core's part of one alone.

        The simulator stretches what cores do where others compute beside.
        """
        cluster = self.outcome.links.cluster
        called_s, _ = handled_s(cluster, nbytes, way.busy)
        moved_s = max(0.0, self._moved_s(nbytes, way.busy) - called_s)
        spent_s = sum(handled_s(cluster, nbytes, way.alone))
        return Boundary(forward_s=moved_s, backward_s=moved_s, host_s=spent_s, value_bytes=nbytes)

    def _moved_s(self, nbytes: int, hops: Sequence[Hop]) -> float:
        """Return the seconds of handing a value on.

        Frameworks without sequence parallelism send a part from each tensor-parallel rank, which the receivers gather
        (Narayanan et al. 2021, section 4.1; DeepSpeed's partitioned pipeline tensors).
        """
        links, axis = self.outcome.links, self.outcome.links.whole_axis
        if not nbytes:
            return 0.0
        if axis < 0:
            return float(collective_s("point_to_point", nbytes, hops))
        sent_s = float(collective_s("point_to_point", nbytes // links.sizes[axis], hops))
        return sent_s + links.message_s(Message("all_gather", axis, nbytes))
