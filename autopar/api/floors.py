"""What each block of a program takes and holds at least, whatever its layouts: what `search.fluid` bounds trials by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.api.crossings import alive_between
from autopar.capture.recompute import KEPT, block_of, copies_of
from autopar.costs.again import kept_values
from autopar.costs.expanded import index_shares
from autopar.costs.liveness import gradients_of
from autopar.costs.operators import seconds
from autopar.costs.optimizer import state_bytes
from autopar.costs.surroundings import Surroundings
from autopar.ir.graph import Graph, Op
from autopar.ir.roles import base_of, of_parameters, parameter_like
from autopar.ir.stages import homes, units
from autopar.ir.strategy import MeshStrategy
from autopar.ir.table import Floats, Ints
from autopar.ir.weight_gradients import weight_gradients
from autopar.search.fluid import Fluid
from autopar.search.moved import Moved
from autopar.search.trials import Uniform
from cost_models.device import DeviceSpec

WAYS: tuple[Uniform, ...] = ("none", "casts", "cheap", "selective", "per_operator", "keep_attention", "full")
"""Ways of recomputing a block, from what takes least to what saves least."""


def names_again(graph: Graph, way: Uniform) -> frozenset[str]:
    """Return the operators that run again if all blocks are recomputed one way."""
    if way == KEPT:
        return frozenset()
    return frozenset(name for names in copies_of(graph, {"*": way}).values() for name in names)


class Parts(NamedTuple):
    """Seconds that blocks take at least for one micro-batch on one device."""

    forward_s: Floats
    input_gradient_s: Floats
    weight_gradient_s: Floats
    """[block] each."""

    again_s: Floats
    """[block, way]: recomputation."""


class _Cells(NamedTuple):
    """Operators, and which cell of a table what each takes belongs to."""

    names: list[str]
    cell: Ints

    def sums(self, spent: Mapping[str, float], cells: int) -> Floats:
        """Return what each cell's operators take together, in their order."""
        each = np.array([spent.get(name, 0.0) for name in self.names], dtype=np.float64)
        return np.asarray(np.bincount(self.cell, each, cells), dtype=np.float64)


@dataclass(frozen=True)
class Work:
    """What of blocks' work each rank has to do for its own samples, and what ranks that split the batch may share."""

    of_samples: Parts
    of_parameters: Parts
    """See `ir.roles.of_parameters`."""

    @property
    def least_s(self) -> float:
        """Return the seconds of all blocks, nothing recomputed."""
        return sum(float(each.sum()) for parts in (self.of_samples, self.of_parameters) for each in parts[:3])

    def shared_by(self, ranks: int, all_samples: Work) -> Parts:
        """Return the whole where so many ranks split the batch, and parameters with it.

        A rank does its part of what may be shared for the samples of all of them: no less than an even share of what
        that takes, whole. What reads parameters takes as long for many samples as for few, what multiplies does not.
        """
        any_s = all_samples.of_parameters
        return Parts(*(own + each / ranks for own, each in zip(self.of_samples, any_s, strict=True)))


@dataclass(frozen=True)
class Floors:
    """A captured program without recomputation, whose blocks are those between which pipelines may be cut."""

    graph: Graph
    optimizer: str

    @cached_property
    def _home(self) -> Mapping[str, int]:
        """Return the block of every operator."""
        return homes(self.graph)

    @cached_property
    def _late(self) -> frozenset[str]:
        return weight_gradients(self.graph, self._home)

    @cached_property
    def _again(self) -> tuple[frozenset[str], ...]:
        return tuple(names_again(self.graph, way) for way in WAYS)

    @cached_property
    def saved_bytes(self) -> Floats:
        """Return [block, way] of all samples, whole: what forward makes and backward, or what runs again, reads."""
        return np.array([self._saved(again) for again in self._again]).T

    def _saved(self, again: Collection[str]) -> list[float]:
        graph, casts = self.graph, parameter_like(self.graph)
        held: dict[int, float] = defaultdict(float)
        for name, index in sorted(kept_values(graph, again)):
            op = graph.by_name[name]
            meta = op.outputs[index]
            # What is made outside of layers may be written over while the loss is computed.
            if op.kind == "call" and op.phase == "forward" and name not in casts and name in self._inside and meta:
                held[self._home[name]] += meta.nbytes
        return [held[block] for block in range(len(units(graph)))]

    @cached_property
    def _late_bytes(self) -> Floats:
        """Return what weight gradients of each block read, of all samples, whole."""
        graph, base, casts = self.graph, base_of(self.graph), parameter_like(self.graph)
        read = {base[ref.op, ref.index] for op in graph.ops if op.name in self._late for ref in op.refs}
        held = np.zeros(len(units(graph)))
        for name, index in sorted(read):
            op = graph.by_name[name]
            meta = op.outputs[index]
            if op.kind == "call" and name not in casts and name not in self._late and name in self._inside and meta:
                held[self._home[name]] += meta.nbytes
        return held

    @cached_property
    def _inside(self) -> frozenset[str]:
        """Return the operators of blocks that can be recomputed."""
        return frozenset(op.name for op in self.graph.ops if block_of(op))

    @cached_property
    def _static_bytes(self) -> tuple[Floats, Floats]:
        """Return, of each block, its parameters and optimizer state, and its gradients, whole."""
        graph = self.graph
        rest, sums = (np.zeros(len(units(graph))) for _ in range(2))
        for op in graph.ops:
            meta = op.outputs[0] if op.kind == "parameter" else None
            if meta is not None:
                state = state_bytes(op, (), (), self.optimizer) if op.requires_grad else 0.0
                rest[self._home[op.name]] += meta.nbytes + state
        for name, index in gradients_of(graph):
            meta = graph.by_name[name].outputs[index]
            sums[self._home[name]] += meta.nbytes if meta is not None else 0.0
        return rest, sums

    @cached_property
    def crossing_bytes(self) -> float:
        """Return what of all samples crosses, whole, between any two blocks at least."""
        alive = alive_between(self.graph, self._home, len(units(self.graph)))
        metas = ([op.outputs[index] for op, index in values] for values in alive)
        return min((float(sum(meta.nbytes for meta in each if meta)) for each in metas), default=0.0)

    def work(self, options: Mapping[str, Sequence[MeshStrategy]], sizes: tuple[int, ...], device: DeviceSpec) -> Work:
        """Return what each block takes at least on a device.

        `options` are those of each operator on the ranks that share its samples, `sizes` those of their mesh.
        """
        graph = self.graph
        least = {rep: self._least_s(graph.by_name[rep], found, sizes, device) for rep, found in options.items()}
        spent = {op.name: least.get(graph.representative(op.name), 0.0) for op in graph.ops}
        shared = of_parameters(graph)
        return Work(
            self._summed({name: each for name, each in spent.items() if name not in shared}),
            self._summed({name: each for name, each in spent.items() if name in shared}),
        )

    def _summed(self, spent: Mapping[str, float]) -> Parts:
        """Return what operators take, by their blocks."""
        count = len(units(self.graph))
        forward, inputs, weights = self._parts.sums(spent, 3 * count).reshape(count, 3).T
        again = self._runs_again.sums(spent, count * len(WAYS))
        return Parts(forward, inputs, weights, again.reshape(count, len(WAYS)))

    @cached_property
    def _parts(self) -> _Cells:
        """Return the part of its block that each operator is of: forward, input gradient or weight gradient."""
        names = [op.name for op in self.graph.ops]
        part = [0 if op.phase == "forward" else 2 if op.name in self._late else 1 for op in self.graph.ops]
        return _Cells(names, np.array([3 * self._home[name] + at for name, at in zip(names, part, strict=True)]))

    @cached_property
    def _runs_again(self) -> _Cells:
        """Return the blocks and ways in which operators run again."""
        found = [(name, way) for way, names in enumerate(self._again) for name in sorted(names)]
        cell = [self._home[name] * len(WAYS) + way for name, way in found]
        return _Cells([name for name, _ in found], np.array(cell, dtype=np.int64))

    def blocks(
        self,
        work: Parts,
        ways: Collection[Uniform],
        *,
        parts: int,
        shards: int,
        sums: bool,
        elsewhere_s: float = 0.0,
        beside: Sequence[Parts] = (),
        moved: Moved | None = None,
    ) -> Fluid:
        """Return the program as kinds of blocks that can be recomputed in these ways.

        Values are cut into at most `parts` by samples and ranks, parameters into `shards`. `sums`: gradients are held
        from one micro-batch to the next. `elsewhere_s`: what a micro-batch takes through all blocks, if that is more
        than their operators take. `beside`: what they take on other devices, if those of a kind are to be alike there,
        too. `moved`: what of each block's parameters and gradients is moved.
        """
        rest, gradients = self._static_bytes
        static = (rest + gradients * sums) / shards
        chosen = [way in ways for way in WAYS]
        saved, late = self.saved_bytes[:, chosen] / parts, self._late_bytes / parts
        tried, others = (
            [each._replace(again_s=each.again_s[:, chosen]) for each in works] for works in ((work,), beside)
        )
        return _alike(tried[0], saved, late, static, elsewhere_s, others, moved)

    def _least_s(self, op: Op, options: Sequence[MeshStrategy], sizes: tuple[int, ...], device: DeviceSpec) -> float:
        if op.kind != "call":
            return 0.0
        metas = tuple(self.graph.meta(ref) for ref in op.refs)
        around = Surroundings(shares=index_shares(self.graph).get(op.name))
        return float(seconds(op, metas, options, sizes, device, around).min(initial=np.inf))


def _alike(
    work: Parts,
    saved: Floats,
    late: Floats,
    static: Floats,
    elsewhere_s: float,
    beside: Sequence[Parts],
    moved: Moved | None,
) -> Fluid:
    """Return blocks that are equal as one kind; the first and the last are kinds of their own."""
    own, *others = ((each.forward_s, each.input_gradient_s, each.weight_gradient_s) for each in (work, *beside))
    apart = [column for each, theirs in zip(beside, others, strict=True) for column in (*theirs, each.again_s)]
    apart += [] if moved is None else [moved.columns]
    count = len(static)
    place = np.arange(count)
    numbers = np.column_stack([*own, work.again_s, saved, late, static, *apart])
    # Sums of the same numbers in another order are not the same number.
    digits = 1e-9 * np.maximum(numbers.max(axis=0), 1e-300)
    rounded = np.column_stack([place == 0, place == count - 1, np.rint(numbers / digits)])
    _, first, counts = np.unique(rounded, axis=0, return_index=True, return_counts=True)
    order = np.argsort(first)
    at = first[order]
    more_s = max(0.0, elsewhere_s - float(sum(each.sum() for each in own)))
    forward, inputs, weights = (each[at] for each in own)
    return Fluid(
        counts[order].astype(np.int64),
        forward,
        inputs,
        weights,
        work.again_s[at],
        saved[at],
        late[at],
        static[at],
        more_s,
        None if moved is None else moved.of(at),
    )
