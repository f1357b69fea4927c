"""Reshard steps as local operators and collectives.

A tensor's dimension `d`, split by an axis of size `n` at some digit, is locally
`[runs, rest]` of what is `[runs, n, rest]` when whole along that axis. Gathering,
scattering and exchanging work on dimension 0 of a contiguous buffer; everything
else here is the permutation between the two. Where `d == 0` and `runs == 1`
there is none. A padded shard is filled up with zeros before it is cut or
scattered, and cut to the dimension's size behind its gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.placement import (
    Layout,
    Partial,
    Shard,
    goes_to_experts,
    is_own,
    local_outer,
    local_runs,
    local_shape,
    padding,
)
from autopar.ir.reshard import Step
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.expert_ops import EXPERTS
from autopar.rewrite.marks import C10D, WAIT, Mark, over_microbatches

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Writer:
    """Writes reshard steps of one rank into a graph."""

    graph: fx.Graph
    mesh: Mesh
    coordinate: tuple[int, ...]

    def call(self, mark: Mark, target: Any, *args: Any) -> fx.Node:
        """Append one local operator."""
        node = self.graph.call_function(target, args)
        node.meta["autopar"] = mark
        return node

    def step(
        self, value: fx.Node, step: Step, shape: Sequence[int], mark: Mark, known: fx.Node | None = None
    ) -> fx.Node:
        """Append what takes `value`, of global `shape`, from `step.before` to `step.after`; return the result.

        `known` says where the rows of each expert end on each rank, if rows go there or back.
        """
        if is_own(step.before[step.axis]):
            return _ToExperts(self, step, tuple(shape), mark).own(value, known)
        kind = _InTime if self.mesh.axes[step.axis].in_time else _Step
        write = kind(self, step, tuple(shape), mark)
        result: fx.Node = getattr(write, step.kind)(value)
        result.meta["local_shape"] = write.shape_after
        return result


@dataclass(frozen=True)
class _Step:
    writer: Writer
    step: Step
    shape: tuple[int, ...]
    mark: Mark

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.writer.mesh.sizes

    @property
    def size(self) -> int:
        return self.sizes[self.step.axis]

    @property
    def group(self) -> str:
        return self.writer.mesh.axes[self.step.axis].name

    @property
    def shape_before(self) -> tuple[int, ...]:
        return local_shape(self.shape, self.step.before, self.sizes)

    @property
    def shape_after(self) -> tuple[int, ...]:
        return local_shape(self.shape, self.step.after, self.sizes)

    def _move(self, target: Any, *args: Any) -> fx.Node:
        return self.writer.call(self.mark_as("move"), target, *args)

    def mark_as(self, role: Any) -> Mark:
        m = self.mark
        return Mark(m.origin, m.phase, role, m.moves, m.gathers_parameter, m.gradient)

    def _exchange(self, target: Any, buffer: fx.Node, *args: Any) -> fx.Node:
        whole = self._move(_ATEN.contiguous.default, buffer)
        started = self.writer.call(self.mark_as("start"), target, whole, *args, self.group)
        return self.writer.call(self.mark_as("wait"), WAIT, started)

    def _shard(self, layout: Layout) -> Shard:
        placement = layout[self.step.axis]
        if not isinstance(placement, Shard):
            raise TypeError(f"{placement} is no shard")
        return placement

    def _partial(self) -> Partial:
        placement = self.step.before[self.step.axis]
        if not isinstance(placement, Partial):
            raise TypeError(f"{placement} is no partial")
        return placement

    def slice(self, value: fx.Node) -> fx.Node:
        after = self._shard(self.step.after)
        dim, runs = after.dim, local_outer(self.step.after, self.step.axis, self.sizes)
        at = 0 if after.rows == "first" else self.writer.coordinate[self.step.axis]
        value, _ = self._filled(value, dim)
        if runs == 1:
            length = self.shape_after[dim]
            own = self._move(_ATEN.slice.Tensor, value, dim, at * length, (at + 1) * length)
            # Kernels take some inputs (statistics of a normalisation) to be contiguous without looking.
            return own if dim == 0 else self._move(_ATEN.contiguous.default, own)
        own = self._move(_ATEN.select.int, self._split(value, self.shape_before, dim, runs), dim + 1, at)
        return self._move(_ATEN.reshape.default, own, list(self.shape_after))

    def mask(self, value: fx.Node) -> fx.Node:
        # Nodes, names and memory alike on every rank, so that passes treat all ranks' programs alike: hence the copy.
        first = self.writer.coordinate[self.step.axis] == 0
        target = _ATEN.clone.default if first else _ATEN.zeros_like.default
        kwargs: dict[str, fx.node.Argument] = {"memory_format": torch.contiguous_format}
        masked = self.writer.graph.create_node("call_function", target, (value,), kwargs, name="masked")
        masked.meta["autopar"] = self.mark_as("move")
        return masked

    def all_reduce(self, value: fx.Node) -> fx.Node:
        value, reduce = self._summand(value)
        return self._exchange(C10D.all_reduce.default, value, reduce)

    def all_gather(self, value: fx.Node) -> fx.Node:
        dim, runs = self._shard(self.step.before).dim, local_outer(self.step.before, self.step.axis, self.sizes)
        source, order = permuted(value, len(self.shape))
        length = self.shape_after[dim]
        lacking = padding(self.shape, self.step.before, self.step.axis, self.sizes)
        if runs == 1 and order[dim] == 0 and source is not value:
            # The memory behind a transposed value is whole blocks already: no copy before the gather, and none after.
            gathered = self._exchange(C10D.all_gather_into_tensor.default, source, self.size)
            own = self._move(_ATEN.slice.Tensor, gathered, 0, 0, length) if lacking else gathered
            return self._move(_ATEN.permute.default, own, order)
        gathered = self._exchange(C10D.all_gather_into_tensor.default, value, self.size)
        whole = self._from_front(gathered, self.shape_before, dim, runs)
        if not lacking:
            return whole
        own = self._move(_ATEN.slice.Tensor, whole, dim, 0, length)
        return own if dim == 0 else self._move(_ATEN.contiguous.default, own)

    def reduce_scatter(self, value: fx.Node) -> fx.Node:
        dim, runs = self._shard(self.step.after).dim, local_outer(self.step.after, self.step.axis, self.sizes)
        value, reduce = self._summand(value)
        value, shape = self._filled(value, dim)
        buffer = self._to_front(value, shape, dim, runs)
        return self._exchange(C10D.reduce_scatter_tensor.default, buffer, reduce, self.size)

    def _filled(self, value: fx.Node, dim: int) -> tuple[fx.Node, tuple[int, ...]]:
        """Return the value with zeros behind `dim` so that ranks hold equal parts of it, and its shape then."""
        shape = list(self.shape_before)
        lacking = padding(self.shape, self.step.after, self.step.axis, self.sizes)
        if not lacking:
            return value, tuple(shape)
        shape[dim] += lacking
        filling = [0, 0] * (len(shape) - 1 - dim) + [0, lacking]
        return self._move(_ATEN.constant_pad_nd.default, value, filling), tuple(shape)

    def _summand(self, value: fx.Node) -> tuple[fx.Node, str]:
        """Return the local term and how to reduce it: gloo has no mean, so that becomes a sum of fractions."""
        reduce = self._partial().reduce
        if reduce != "avg":
            return value, reduce
        return self._move(_ATEN.div.Scalar, value, self.size), "sum"

    def all_to_all(self, value: fx.Node) -> fx.Node:
        """Send the blocks of the digit split next, receive those of the digit split before.

        Both digits are whole in `value` or in the result; a block has neither.
        """
        old, new = self._shard(self.step.before), self._shard(self.step.after)
        out_runs = local_runs(new, self.step.before, self.sizes)
        in_runs = local_runs(old, self.step.after, self.sizes)
        block = list(self.shape_before)
        block[new.dim] //= self.size
        buffer = self._to_front(value, self.shape_before, new.dim, out_runs)
        splits = [block[0]] * self.size
        received = self._exchange(C10D.all_to_all_single.default, buffer, splits, splits)
        return self._from_front(received, tuple(block), old.dim, in_runs)

    def _split(self, value: fx.Node, shape: Sequence[int], dim: int, runs: int) -> fx.Node:
        """View dimension `dim` as `[runs, n, rest]`."""
        rest = shape[dim] // (runs * self.size)
        split = [*shape[:dim], runs, self.size, rest, *shape[dim + 1 :]]
        return self._move(_ATEN.view.default, value, split)

    def _to_front(self, value: fx.Node, shape: Sequence[int], dim: int, runs: int) -> fx.Node:
        """Return `[n * first, ...]`: the blocks of `dim`, one behind the other along dimension 0."""
        if dim == 0 and runs == 1:
            return value
        order = [dim + 1, *(d for d in range(len(shape) + 2) if d != dim + 1)]
        blocks = self._move(_ATEN.permute.default, self._split(value, shape, dim, runs), order)
        block = list(shape)
        block[dim] //= self.size
        return self._move(_ATEN.reshape.default, blocks, [self.size * block[0], *block[1:]])

    def _from_front(self, buffer: fx.Node, block: Sequence[int], dim: int, runs: int) -> fx.Node:
        """Return the tensor whose blocks of shape `block` lie one behind the other along dimension 0."""
        if dim == 0 and runs == 1:
            return buffer
        rest = block[dim] // runs
        stacked = self._move(_ATEN.view.default, buffer, [self.size, *block[:dim], runs, rest, *block[dim + 1 :]])
        order = [*range(1, dim + 2), 0, *range(dim + 2, len(block) + 2)]
        whole = list(block)
        whole[dim] *= self.size
        return self._move(_ATEN.reshape.default, self._move(_ATEN.permute.default, stacked, order), whole)


def permuted(value: fx.Node, dims: int) -> tuple[fx.Node, list[int]]:
    """Return what a value is the same elements of in another order of dimensions, and each dimension's place there."""
    order = list(range(dims))
    while value.op == "call_function" and value.target in _PERMUTES:
        source, *how = value.args
        if not isinstance(source, fx.Node):
            break
        place = list(range(dims))
        if value.target is _ATEN.permute.default:
            place = [int(each) % dims for each in how[0]]  # type: ignore[union-attr, arg-type]
        elif dims > 1:
            a, b = (int(each) % dims for each in how) if how else (0, 1)  # type: ignore[arg-type]
            place[a], place[b] = b, a
        order = [place[each] for each in order]
        value = source
    return value, order


_PERMUTES = frozenset({_ATEN.t.default, _ATEN.transpose.int, _ATEN.permute.default})


@dataclass(frozen=True)
class _ToExperts(_Step):
    """Steps between the order that each rank has its rows in and the ranks of their experts."""

    def own(self, value: fx.Node, known: fx.Node | None) -> fx.Node:
        """Return rows there or back, given where those of each expert end; without that, where they do."""
        there = goes_to_experts(self.step.before[self.step.axis], self.step.after[self.step.axis])
        if known is None:
            ends = self._exchange(C10D.all_gather_into_tensor.default, value, self.size)
            return self._move(EXPERTS.known.default, ends, self.size)
        place = self.writer.coordinate[self.step.axis]
        if not there:
            value = self._move(EXPERTS.by_rank.default, value, known, place)
        rows = self._exchange(EXPERTS.exchange.default, value, known, place, not there)
        moved = self._move(EXPERTS.by_expert.default, rows, known, place) if there else rows
        moved.meta["local_shape"] = self.shape_after
        return moved


_CUTS = frozenset({_ATEN.slice.Tensor, _ATEN.select.int})


@dataclass(frozen=True)
class _InTime(_Step):
    """Steps along the axis of micro-batches: no rank has what another micro-batch computes."""

    def mask(self, value: fx.Node) -> fx.Node:
        """Give every micro-batch an equal term, so that their sum is the value."""
        return self._move(_ATEN.div.Scalar, value, self.size)

    def slice(self, value: fx.Node) -> fx.Node:
        own = cut = super().slice(value)
        while cut.target not in _CUTS:  # what lies behind it only moves the part
            cut = cut.all_input_nodes[0]
        cut.meta["cut_in_time"] = self.size
        return own

    def all_reduce(self, value: fx.Node) -> fx.Node:
        value, reduce = self._summand(value)
        joined = self._move(over_microbatches, value)
        joined.meta["reduce"] = reduce
        return joined

    def all_gather(self, value: fx.Node) -> fx.Node:
        raise self._impossible()

    def reduce_scatter(self, value: fx.Node) -> fx.Node:
        raise self._impossible()

    def all_to_all(self, value: fx.Node) -> fx.Node:
        raise self._impossible()

    def _impossible(self) -> RewriteError:
        return RewriteError(f"{self.mark.moves} needs all micro-batches at once ({self.step.kind})")
