"""What a trial of the outer search takes, roughly: for trying likely ones first, not for choosing between them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from math import inf

from autopar.costs.links import Links, Message
from autopar.costs.liveness import gradients_of, lives
from autopar.costs.optimizer import state_bytes
from autopar.costs.segments import weight
from autopar.ir.graph import Graph
from autopar.ir.roles import parameter_like
from autopar.ir.stages import units
from cost_models.cluster import ClusterSpec


@dataclass(frozen=True)
class Shape:
    """The numbers of a trial."""

    depth: int
    microbatches: int
    replicas: int
    """Ranks along which the batch is split."""

    shards: int
    """Of these, ranks along which parameters may be sharded at rest."""

    width: int
    """Ranks along which tensors are."""


@dataclass(frozen=True)
class Rough:
    """Sizes of a whole program on one device."""

    graph: Graph
    cluster: ClusterSpec
    optimizer: str

    @cached_property
    def work(self) -> float:
        """Return about how much the program computes, in FLOPs."""
        return sum(weight(self.graph, op) for op in self.graph.ops)

    @cached_property
    def _parameter_bytes(self) -> float:
        metas = (op.outputs[0] for op in self.graph.ops if op.kind == "parameter")
        return float(sum(meta.nbytes for meta in metas if meta is not None))

    @cached_property
    def _gradient_bytes(self) -> float:
        return self._bytes_of(gradients_of(self.graph))

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

    def least_bytes(self, shape: Shape, *, whole_parameters: bool = False) -> float:
        """Return about what the first pipeline rank holds if all that can be split is, in stages of equal size."""
        in_flight = min(shape.depth, shape.microbatches)
        return self._held(shape, in_flight, 1 if whole_parameters else shape.shards)

    def fits(self, shape: Shape, budget_bytes: float) -> bool:
        """Return whether some layouts and cut may fit: false is proven, by what the average rank holds."""
        return self._held(shape, 1, shape.shards) <= budget_bytes

    def _held(self, shape: Shape, in_flight: int, shards: int) -> float:
        # Without micro-batches, gradients come when what forward saved has gone.
        gradients = self._gradient_bytes if shape.microbatches > 1 else 0.0
        static = (self._parameter_bytes + gradients + self._state_bytes) / (shape.depth * shape.width * shards)
        parts = shape.microbatches * shape.replicas * shape.width * shape.depth
        casts = self._cast_bytes * in_flight / (shape.depth * shape.width * shards)
        return static + casts + self._saved_bytes * in_flight / parts + float(self.cluster.device.reserved_bytes)

    def estimate_s(self, shape: Shape, microbatch_s: float, budget_bytes: float) -> float:
        """Return about how long a step takes, given one micro-batch through all stages without data parallelism.

        Infinite where not even the thriftiest layouts fit.
        """
        if self.least_bytes(shape) > budget_bytes:
            return inf
        links = Links(self.cluster, (shape.depth, shape.replicas, shape.width))
        own = shape.depth * shape.width
        reduce_s = links.message_s(Message("all_reduce", 1, round(self._gradient_bytes / own)))
        gather_s = 0.0
        if self.least_bytes(shape, whole_parameters=True) > budget_bytes:
            once = links.message_s(Message("all_gather", 1, round(self._parameter_bytes / own)))
            gather_s = 2.0 * shape.microbatches * once
        busy = shape.microbatches * microbatch_s / shape.depth
        bubble = busy * (shape.depth - 1) / shape.microbatches
        return max(busy, gather_s) + bubble + reduce_s
