"""Products of tokens with their experts' weights, where tokens or experts are split.

tokens    each expert's tokens end, in this rank's part, after as many as this rank has before its end
experts   the tokens of this rank's experts are moved to the front, multiplied, and moved back; the others are zero
routed    the tokens are those of this rank's experts, of all ranks; where they end, all ranks told each other
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.ir.placement import Layout, Replicate, Shard
from autopar.rewrite.expert_ops import EXPERTS
from autopar.rewrite.lowerings.places import aten, count_before, digits, own_part, widened
from autopar.rewrite.site import Site

_TO_THE_END = (1 << 63) - 1


def _target(site: Site) -> Any:
    space, packet, overload = site.op.target.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def _routed(site: Site, known: fx.Node, tokens: fx.Node) -> fx.Node:
    """Return where the tokens of each of this rank's experts end, among those that came to it."""
    (axis,) = site.axes("routed")
    place = site.coordinate[axis]
    for user in known.users:
        if user.target is EXPERTS.ends.default and user.args[:2] == (known, place):
            return user
    return site.call(EXPERTS.ends.default, known, place, tokens)


def _ends(site: Site, ends: fx.Node, tokens: int, dim: int) -> fx.Node:
    """Return where each expert's tokens end in this rank's part of them."""
    held = digits(site, site.strategy.inputs[tokens], dim, site.metas[tokens].shape[dim])
    return count_before(site, ends, held)


class _Mine:
    """The tokens of this rank's experts, moved to the front and back."""

    def __init__(self, site: Site, ends: fx.Node, tokens: int, layout: Layout, count: int) -> None:
        """`layout`: of what has the `count` experts in its first dimension; `tokens`: how many this rank has."""
        self.site = site
        shards = tuple(p if isinstance(p, Shard) and p.dim == 0 else Replicate() for p in layout)
        shifted = site.call(aten.slice.Tensor, ends, 0, 0, count - 1)
        starts = site.call(aten.constant_pad_nd.default, shifted, [1, 0], 0)
        first = site.call(aten.slice.Tensor, own_part(site, starts, shards, (count,)), 0, 0, 1)
        mine = own_part(site, ends, shards, (count,))
        self.ends = site.call(aten.sub.Tensor, mine, first)
        last = site.call(aten.slice.Tensor, self.ends, 0, -1, _TO_THE_END)
        self._rows = site.call(aten.arange.default, tokens, dtype=torch.int64, device=torch.device("cpu"))
        self._there = site.call(aten.remainder.Scalar, site.call(aten.add.Tensor, self._rows, first), tokens)
        self._back = site.call(aten.remainder.Scalar, site.call(aten.sub.Tensor, self._rows, first), tokens)
        self._others = site.call(aten.ge.Tensor, self._rows, last)

    def front(self, value: fx.Node, dim: int) -> fx.Node:
        """Return a tensor of tokens with those of this rank's experts first, zero behind them."""
        moved = self.site.call(aten.index_select.default, value, dim, self._there)
        return self.site.call(aten.masked_fill.Scalar, moved, widened(self.site, self._others, 1 - dim), 0)

    def back(self, value: fx.Node) -> fx.Node:
        """Return a tensor of tokens in its own order, zero where the token is not of this rank's experts."""
        cleared = self.site.call(aten.masked_fill.Scalar, value, widened(self.site, self._others, 1), 0)
        return self.site.call(aten.index_select.default, cleared, 0, self._back)


def grouped_mm(site: Site) -> fx.Node:
    """Emit tokens by experts, or tokens by tokens (the gradient of the experts)."""
    x, w, ends, *rest = site.args
    of_tokens = len(site.metas[1].shape) == 2
    if site.axes("rows"):
        ends = _ends(site, ends, int(of_tokens), 0)
    if site.axes("routed"):
        ends = _routed(site, ends, x)
    if not site.axes("experts"):
        return site.call(_target(site), x, w, ends, *rest, **site.kwargs)
    if of_tokens:
        made, layout = site.op.outputs[0], site.strategy.outputs[0]
        if made is None or layout is None:
            raise ValueError(f"{site.op.name} makes no tensor")
        mine = _Mine(site, ends, site.local_input(1)[0], layout, made.shape[0])
        return site.call(_target(site), mine.front(x, 1), mine.front(w, 0), mine.ends, *rest, **site.kwargs)
    mine = _Mine(site, ends, site.local_input(0)[0], site.strategy.inputs[1], site.metas[1].shape[0])
    return mine.back(site.call(_target(site), mine.front(x, 0), w, mine.ends, *rest, **site.kwargs))


def grouped_mm_backward(site: Site) -> tuple[fx.Node, fx.Node]:
    """Emit the gradients of tokens and experts."""
    x, w, ends, grad = site.args
    if site.axes("rows"):
        ends = _ends(site, ends, 0, 0)
    if site.axes("routed"):
        ends = _routed(site, ends, x)
    mine = None
    if site.axes("experts"):
        mine = _Mine(site, ends, site.local_input(0)[0], site.strategy.inputs[1], site.metas[1].shape[0])
        x, grad, ends = mine.front(x, 0), mine.front(grad, 0), mine.ends
    both = site.call(_target(site), x, w, ends, grad)
    of_x, of_w = (site.call(operator.getitem, both, i) for i in range(2))
    return (of_x if mine is None else mine.back(of_x)), of_w
