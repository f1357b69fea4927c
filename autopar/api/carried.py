"""What ranks that take other samples have to move of parameters and gradients, whatever the layouts, block by block.

For bounds (`search.moved`): of parameters that no strategy computes with in parts, and of gradients that every strategy
makes as terms of a sum, along an axis of data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from autopar.api.kinds import beside_data, shape_of
from autopar.costs.links import Links, Message
from autopar.costs.optimizer import least_optimizer_s
from autopar.ir.graph import Graph, Op, Ref
from autopar.ir.placement import Partial, Replicate
from autopar.ir.roles import CASTS, is_view, parameter_like
from autopar.ir.stages import units
from autopar.ir.strategy import MeshStrategy
from autopar.ir.table import Floats
from autopar.search.moved import Moved
from autopar.search.trials import Trial
from cost_models.device import DeviceSpec

_HALVED = 4
"""How often the size of a collective is halved, to find the least seconds a byte."""


@dataclass(frozen=True)
class Carried:
    """What one program carries along axes of data parallelism."""

    graph: Graph
    home: Mapping[str, int]
    """The block of every operator."""

    optimizer: str
    strategies: Mapping[str, Sequence[MeshStrategy]]
    """Of each operator, by its representative, what it may do along such an axis alone."""

    _spent_s: dict[str, Floats] = field(init=False, default_factory=dict)
    """Of the optimizer, by device."""

    def moved(self, trial: Trial, links: Links) -> Moved:
        """Return what a trial moves of each block; `links` are those of its mesh."""
        shape, sizes, count = shape_of(trial), self._sizes, trial.microbatches
        width = prod(axis.size for axis in beside_data(trial))
        parts = shape.shards * shape.width
        sharing, copying = (_axis(trial, role) for role in ("dp_shard", "dp_replicate"))
        reduced = np.minimum(count * sizes.term, sizes.total)
        gather = _seconds(links, "all_gather", sharing, sizes.used / width)
        reduce = _seconds(links, "reduce_scatter", sharing, reduced / width)
        # Where nothing is sharded at rest, sums are whole on all ranks, and nothing is gathered.
        whole = _seconds(links, "all_reduce", sharing, reduced / width)
        once = np.where(sizes.term > 0, np.minimum(whole, reduce + gather), 0.0)
        again = count * sizes.phases * gather + reduce - once
        each = np.maximum(0.0, count * _seconds(links, "reduce_scatter", sharing, sizes.term / width) - reduce)
        across = _seconds(links, "all_reduce", copying, reduced / parts)
        beside = sizes.rest / width - sizes.rest / parts
        held = np.where(sizes.cast, np.minimum(sizes.used / width, beside), beside)
        sums = sizes.total / width - sizes.total / parts if count > 1 else np.zeros_like(held)
        link, shown = 0, 1
        rows = (
            once[shown] + across[shown], once[link], across[link], held, again[shown], again[link], sums, each[shown],
            each[link],
        )  # fmt: skip
        return Moved(
            self._optimizer_s(links.cluster.device) / parts, *(self._by_block(sizes.block, row) for row in rows)
        )

    def _optimizer_s(self, device: DeviceSpec) -> Floats:
        """Return [block] the seconds of the optimizer on one device that has all parameters."""
        key = device.name
        if key not in self._spent_s:
            trained = [op for op in self.graph.ops if op.kind == "parameter" and op.requires_grad]
            block = np.array([self.home[op.name] for op in trained], dtype=np.int64)
            self._spent_s[key] = self._by_block(block, least_optimizer_s(trained, self.optimizer, device))
        return self._spent_s[key]

    def _by_block(self, block: np.ndarray[tuple[int, ...], np.dtype[np.int64]], each: Floats) -> Floats:
        return np.asarray(np.bincount(block, each, len(units(self.graph))), dtype=np.float64)

    @cached_property
    def _sizes(self) -> _Sizes:
        gradients = {o.name: o.ref for o in self.graph.outputs if o.kind == "gradient"}
        found = []
        for op, least, readers in self._parameters():
            rest = _nbytes(op, 0)
            phases = {reader.phase for reader, at in readers if self._whole(reader, at)}
            if not phases or any(self.home[reader.name] != self.home[op.name] for reader, _ in readers):
                continue  # a table that stages at both ends read is with either of them
            ref = gradients.get(op.name)
            term, total = (0, 0) if ref is None else self._term(ref)
            found.append((self.home[op.name], rest, least, least < rest, len(phases), term, total if term else 0))
        rows = np.array(found, dtype=np.float64).reshape(len(found), 7).T
        return _Sizes(rows[0].astype(np.int64), rows[1], rows[2], rows[3] > 0, *rows[4:])

    def _parameters(self) -> list[tuple[Op, int, list[tuple[Op, int]]]]:
        """Return each parameter, its bytes in the smallest type that it is in, and who reads it, at what place."""
        graph, starts = self.graph, parameter_like(self.graph)
        root: dict[str, str] = {}
        least: dict[str, int] = {}
        readers: dict[str, list[tuple[Op, int]]] = {}
        for op in graph.ops:
            if op.kind == "parameter":
                root[op.name], least[op.name], readers[op.name] = op.name, _nbytes(op, 0), []
            elif op.name in starts and op.kind == "call" and op.refs[0].op in root:
                root[op.name] = start = root[op.refs[0].op]
                # A view may be of a part: whoever reads that may need no more.
                least[start] = min(least[start], _nbytes(op, 0))
            elif op.kind == "call":
                for at, ref in enumerate(op.refs):
                    if ref.op in root:
                        readers[root[ref.op]].append((op, at))
        return [(graph.by_name[name], least[name], each) for name, each in readers.items()]

    def _whole(self, reader: Op, at: int) -> bool:
        """Return whether an operator needs what it reads whole, however it runs."""
        choices = self.strategies[self.graph.representative(reader.name)]
        return bool(choices) and all(each.axes[0].inputs[at] == Replicate() for each in choices)

    def _term(self, ref: Ref) -> tuple[int, int]:
        """Return the bytes of a gradient in its smallest type, 0 if it may be made in parts, and as it leaves."""
        op, index = self.graph.by_name[ref.op], ref.index
        total = least = _nbytes(op, index)
        while op.kind == "call" and (is_view(op) or op.target in CASTS) and len(op.refs) == 1:
            index, op = op.refs[0].index, self.graph.by_name[op.refs[0].op]
            least = min(least, _nbytes(op, index))
        choices = self.strategies.get(self.graph.representative(op.name), ())
        terms = bool(choices) and all(isinstance(each.axes[0].outputs[index], Partial) for each in choices)
        return (least if terms else 0), total


@dataclass(frozen=True)
class _Sizes:
    """Of parameters that their blocks need whole; [parameter] each, bytes whole."""

    block: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    rest: Floats
    used: Floats
    """In the smallest type that it is in on its way to where it is used."""

    cast: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    """Whether that is in memory of its own, beside what is at rest."""

    phases: Floats
    """In how many of forward and backward it is used."""

    term: Floats
    """Of its gradient, in the smallest type that it is in; 0 where it may be made in parts, or is not."""

    total: Floats
    """Of that gradient as it leaves."""


def _nbytes(op: Op, index: int) -> int:
    meta = op.outputs[index]
    return 0 if meta is None else meta.nbytes


def _axis(trial: Trial, role: str) -> int | None:
    """Return the place of the axis with a role in a trial's mesh; `None` if it has none, or several."""
    found = [place for place, axis in enumerate(trial.mesh) if axis.role == role]
    return found[0] if len(found) == 1 else None


def _seconds(links: Links, op: str, axis: int | None, each: Floats) -> Floats:
    """Return [2, parameter] what moving so many bytes takes at least: of the link, and of that what computation gives.

    All together in one collective take the least time a byte, or some of them, if its algorithm has better sizes.
    """
    together = float(each.sum())
    if axis is None or together < 1.0:
        return np.zeros((2, len(each)))
    sizes = [max(1, round(together / 2**times)) for times in range(_HALVED)]
    messages = [Message(op, axis, size) for size in sizes]
    link_s = min(links.message_s(one) / one.bytes for one in messages)
    shown_s = min(max(0.0, links.shown_s(one)) / one.bytes for one in messages)
    return np.stack([link_s * each, shown_s * each])
