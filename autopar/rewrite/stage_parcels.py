"""How tensors travel between pipeline stages: contiguous, and at the other end strided as before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import Phase
from autopar.rewrite.marks import Mark, mark
from autopar.rewrite.stage_homes import Home, is_dense
from autopar.rewrite.staged import Transfer

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Parcel:
    """How a value travels: once where it is expanded, its dimensions in the order in which they lie in memory.

    Reader's strides are those of the value at its source, so that whatever was a view there is one here.
    """

    node: fx.Node
    expanded: tuple[int, ...]
    """Dimensions along which all elements are one: they travel as 1."""

    order: tuple[int, ...]
    gaps: bool
    """Whether there is memory between its elements, which does not travel."""

    @classmethod
    def of(cls, node: fx.Node) -> Parcel:
        """Return how the value of a node travels."""
        value = node.meta["val"]
        pairs = enumerate(zip(value.shape, value.stride(), strict=True))
        expanded = tuple(dim for dim, (size, stride) in pairs if size > 1 and not stride)
        once = _narrowed(value, expanded)
        return cls(node, expanded, _memory_order(once), not is_dense(once))

    @property
    def name(self) -> str:
        """Return the name that both ends know it by."""
        return self.node.name if self.is_plain else f"{self.node.name}__sent"

    @property
    def is_plain(self) -> bool:
        """Return whether it travels as it is."""
        return not (self.expanded or self._permuted or self.gaps or self._is_start)

    @property
    def _permuted(self) -> bool:
        return self.order != tuple(range(len(self.order)))

    @property
    def _is_start(self) -> bool:
        """Return whether it is a buffer, which gets a new value before it is sent."""
        return self.node.op == "placeholder"

    @property
    def _packed(self) -> torch.Tensor:
        """Return the fake value that travels, as a view of the node's."""
        return _narrowed(self.node.meta["val"], self.expanded).permute(self.order)

    def transfer(self, source: Home, target: Home) -> Transfer:
        """Return the transfer between two programs."""
        packed = self._packed
        shape, dtype = tuple(map(int, packed.shape)), str(packed.dtype).removeprefix("torch.")
        return Transfer(self.name, source.stage, target.stage, source.phase, shape, dtype)

    def pack(self, graph: fx.Graph, value: fx.Node, phase: Phase) -> fx.Node:
        """Append what makes the contiguous tensor that is sent."""
        add = _Appender(graph, phase)
        for dim in self.expanded:
            value = add(_ATEN.slice.Tensor, value, dim, 0, 1)
        if self._permuted:
            value = add(_ATEN.permute.default, value, list(self.order))
        if self.gaps or self._is_start:
            return add(_ATEN.clone.default, value, memory_format=torch.contiguous_format)
        # Kernels may stride their results in another way than they do on fake tensors.
        return add(_ATEN.contiguous.default, value)

    def received(self, graph: fx.Graph) -> fx.Node:
        """Append a placeholder for what is received."""
        received = graph.placeholder(self.name)
        value = self._packed
        if self.gaps:
            value = torch.empty_like(value, memory_format=torch.contiguous_format)
        received.meta = {"val": value, "autopar": mark(self.node)}
        return received

    def restored(self, graph: fx.Graph, value: fx.Node, phase: Phase) -> fx.Node:
        """Append what makes the value of what is received."""
        add = _Appender(graph, phase)
        if self._permuted:
            value = add(_ATEN.permute.default, value, _inverse(self.order))
        whole = self.node.meta["val"]
        if self.gaps:
            once = _narrowed(whole, self.expanded)
            if _can_be_written(once):
                space = add(_ATEN.new_empty_strided.default, value, list(once.shape), list(once.stride()))
                value = add(_ATEN.copy_.default, space, value)
            value.meta["val"] = once
        if self.expanded:
            value = add(_ATEN.expand.default, value, list(whole.shape))
        if self.gaps or self.expanded:
            value.meta["val"] = whole
        return value


@dataclass(frozen=True)
class _Appender:
    """Appends operators with the values that they make of fake tensors."""

    graph: fx.Graph
    phase: Phase

    def __call__(self, target: Any, value: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, (value, *args), kwargs)
        given = fx.map_arg((value, *args), lambda each: each.meta["val"])
        made.meta = {"val": target(*given, **kwargs), "autopar": Mark(mark(value).origin, self.phase)}
        return made


def copied_like(graph: fx.Graph, value: fx.Node, like: torch.Tensor, phase: Phase) -> fx.Node:
    """Append a dense copy of a value whose dimensions lie in memory in the order of another's."""
    add = _Appender(graph, phase)
    order = _memory_order(like)
    moves = order != tuple(range(len(order)))
    if moves:
        value = add(_ATEN.permute.default, value, list(order))
    value = add(_ATEN.clone.default, value, memory_format=torch.contiguous_format)
    return add(_ATEN.permute.default, value, _inverse(order)) if moves else value


def _narrowed(value: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for dim in dims:
        value = value.narrow(dim, 0, 1)
    return value


def _memory_order(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions, outermost in memory first; those of one element stay where they are if that will do."""
    plain = tuple(range(value.dim()))
    strides = value.stride()
    real = [dim for dim in plain if value.shape[dim] > 1]
    if all(strides[a] >= strides[b] for a, b in pairwise(real)):
        return plain
    return tuple(sorted(plain, key=lambda d: (-strides[d], d)))


def _can_be_written(value: torch.Tensor) -> bool:
    """Return whether no two elements share memory."""
    reach = 0
    for size, stride in sorted(zip(value.shape, value.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]
