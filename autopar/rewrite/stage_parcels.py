"""How tensors travel between pipeline stages: contiguous, and at the other end strided as before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """How a value travels: contiguous, its dimensions in the order in which they lie in memory."""

    node: fx.Node
    order: tuple[int, ...]
    copies: bool
    """Whether it is copied first: there are gaps in its memory, or it will be overwritten."""

    @classmethod
    def of(cls, node: fx.Node) -> Parcel:
        """Return how the value of a node travels."""
        overwritten = node.op == "placeholder"
        return cls(node, _memory_order(node.meta["val"]), overwritten or not is_dense(node.meta["val"]))

    @property
    def name(self) -> str:
        """Return the name that both ends know it by."""
        return self.node.name if self.is_plain else f"{self.node.name}__sent"

    @property
    def is_plain(self) -> bool:
        """Return whether it travels as it is."""
        return not self.copies and not self._permuted

    @property
    def _permuted(self) -> bool:
        return self.order != tuple(range(len(self.order)))

    def transfer(self, source: Home, target: Home) -> Transfer:
        """Return the transfer between two programs."""
        value = self.node.meta["val"]
        shape = tuple(int(value.shape[d]) for d in self.order)
        dtype = str(value.dtype).removeprefix("torch.")
        return Transfer(self.name, source.stage, target.stage, source.phase, shape, dtype)

    def pack(self, graph: fx.Graph, value: fx.Node, phase: Phase) -> fx.Node:
        """Append what makes the contiguous tensor that is sent."""
        if self._permuted:
            value = _append(graph, _ATEN.permute.default, value, phase, list(self.order))
        if self.copies:
            value = _append(graph, _ATEN.clone.default, value, phase, memory_format=torch.contiguous_format)
        return value

    def received(self, graph: fx.Graph) -> fx.Node:
        """Append a placeholder for what is received."""
        received = graph.placeholder(self.name)
        value = self.node.meta["val"]
        if self._permuted:
            value = value.permute(self.order)
        if self.copies:
            value = torch.empty_like(value, memory_format=torch.contiguous_format)
        received.meta = {"val": value, "autopar": mark(self.node)}
        return received

    def restored(self, graph: fx.Graph, received: fx.Node, phase: Phase) -> fx.Node:
        """Append what brings a received tensor back into its order of dimensions."""
        if not self._permuted:
            return received
        return _append(graph, _ATEN.permute.default, received, phase, _inverse(self.order))


def copied_like(graph: fx.Graph, value: fx.Node, like: torch.Tensor, phase: Phase) -> fx.Node:
    """Append a dense copy of a value whose dimensions lie in memory in the order of another's."""
    order = _memory_order(like)
    moves = order != tuple(range(len(order)))
    if moves:
        value = _append(graph, _ATEN.permute.default, value, phase, list(order))
    value = _append(graph, _ATEN.clone.default, value, phase, memory_format=torch.contiguous_format)
    return _append(graph, _ATEN.permute.default, value, phase, _inverse(order)) if moves else value


def _memory_order(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions, outermost in memory first."""
    plain = tuple(range(value.dim()))
    strides = value.stride()
    expanded = any(size > 1 and not stride for size, stride in zip(value.shape, strides, strict=True))
    return plain if expanded or value.is_contiguous() else tuple(sorted(plain, key=lambda d: (-strides[d], d)))


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def _append(graph: fx.Graph, target: Any, value: fx.Node, phase: Phase, *args: Any, **kwargs: Any) -> fx.Node:
    made = graph.call_function(target, (value, *args), kwargs)
    before = value.meta["val"]
    after = before.permute(*args) if target is _ATEN.permute.default else torch.empty_like(before, **kwargs)
    made.meta = {"val": after, "autopar": Mark(mark(value).origin, phase)}
    return made
