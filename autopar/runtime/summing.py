"""Gradients added to their sums over micro-batches where they are made, instead of after the program.

    t = mm(a, b);  return t                     addmm_(sum, a, b)
    e = embedding_dense_backward(g, ids, ...)   index_add_(sum, 0, ids, g)
    s = sum(g);    return s                     s = sum(g);  add_(sum, s)

A program that returns its gradients holds all of them at once, in memory that the kernel has to clear anew for each
micro-batch, and reads them when caches have forgotten them. Eager autograd adds each before it makes the next; products
and look-ups need no gradient of their own at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch import LazyGraphModule

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Summing:
    """A program that adds gradients to sums, which are its first arguments, in place."""

    program: fx.GraphModule
    like: Mapping[str, torch.Tensor]
    """Of each gradient, in the order of the arguments: a tensor without data that lies as its sum does."""

    def zeros(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a sum of nothing."""
        value = self.like[name]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).zero_()


def summing(gm: fx.GraphModule, places: Mapping[int, str]) -> Summing:
    """Return the program that adds gradients, named by their places among the results, to sums, of a name to one.

    In their places it returns what adds them, so that who looks on knows when. Gradients of which the graph does not
    tell how they lie are returned as before. `gm` is not changed.
    """
    graph = fx.Graph()
    results: list[Any] = list(graph.graph_copy(gm.graph, {}))  # type: ignore[arg-type]
    first = next(iter(graph.nodes))
    like: dict[str, torch.Tensor] = {}
    sums: dict[str, fx.Node] = {}
    given = tuple(results)
    for place, name in places.items():
        term = given[place]
        value = term.meta.get("val") if isinstance(term, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            continue
        if name not in like:
            like[name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            with graph.inserting_before(first):
                sums[name] = graph.placeholder(f"sum_of_{name}")
            sums[name].meta = {"val": like[name]}
        held = sums[name]
        alone = not term.users and sum(each is term for each in given) == 1
        adding = _into(graph, term, held) if alone else None
        if adding is None:
            with graph.inserting_after(term):
                adding = _call(graph, _ATEN.add_.Tensor, (held, term), term)
        results[place] = adding
    graph.output(tuple(results))
    graph.lint()
    return Summing(LazyGraphModule(gm, graph), like)


def _into(graph: fx.Graph, term: fx.Node, held: fx.Node) -> fx.Node | None:
    """Return what adds to the sum in place of the operator that makes a gradient, through views; `None`: nothing."""
    views, made = [], term
    while made.target in _UNDONE and (made is term or len(made.users) == 1):
        views.append(made)
        made = made.all_input_nodes[0]
    if made.target not in _ADDING or (made is not term and len(made.users) != 1):
        return None
    lies: torch.Tensor = held.meta["val"]
    undone = []
    for view in views:
        target, args = _UNDONE[view.target](view)
        try:
            lies = target(lies, *args)
        except RuntimeError:  # a sum in another order of memory has no such view
            return None
        undone.append((target, args))
    with graph.inserting_before(made):
        into = held
        for target, args in undone:
            into = _call(graph, target, (into, *args), made)
        adding = _ADDING[made.target](graph, made, into)
    if adding is not None:
        for node in (*views, made):
            graph.erase_node(node)
    return adding


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], near: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = {key: near.meta[key] for key in ("block", "autopar") if key in near.meta}
    return node


def _of_shape(view: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    return _ATEN.view.default, (list(view.all_input_nodes[0].meta["val"].shape),)


def _of_order(view: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    order: Any = view.args[1]
    return _ATEN.permute.default, (sorted(range(len(order)), key=order.__getitem__),)


_UNDONE: Mapping[Any, Callable[[fx.Node], tuple[Any, tuple[Any, ...]]]] = {
    _ATEN.t.default: lambda view: (_ATEN.t.default, ()),
    _ATEN.transpose.int: lambda view: (_ATEN.transpose.int, tuple(view.args[1:])),
    _ATEN.permute.default: _of_order,
    _ATEN.view.default: _of_shape,
    _ATEN._unsafe_view.default: _of_shape,
}
"""Views, and what brings a sum that lies as the view does to how the view's input lies."""


def _matrix(graph: fx.Graph, made: fx.Node, into: fx.Node) -> fx.Node | None:
    return _call(graph, _ATEN.addmm_.default, (into, *made.args), made)


def _matrices(graph: fx.Graph, made: fx.Node, into: fx.Node) -> fx.Node | None:
    return _call(graph, _ATEN.baddbmm_.default, (into, *made.args), made)


def _rows(graph: fx.Graph, made: fx.Node, into: fx.Node) -> fx.Node | None:
    """Add rows at their indices, but for those at the padding; in an order that is always the same on CPUs only.

    A padding of -1 says that there is none, any other may be no row of the table.
    """
    gradient, indices, _, padding, scaled = made.args
    value: torch.Tensor = gradient.meta["val"]  # type: ignore[union-attr]
    if value.device.type != "cpu" or scaled:
        return None
    flat = _call(graph, _ATEN.reshape.default, (indices, [-1]), made)
    rows = _call(graph, _ATEN.reshape.default, (gradient, [-1, value.shape[-1]]), made)
    if padding != -1:
        left_out = _call(graph, _ATEN.eq.Scalar, (flat, padding), made)
        flat = _call(graph, _ATEN.masked_fill.Scalar, (flat, left_out, 0), made)
        column = _call(graph, _ATEN.unsqueeze.default, (left_out, 1), made)
        rows = _call(graph, _ATEN.masked_fill.Scalar, (rows, column, 0), made)
    return _call(graph, _ATEN.index_add_.default, (into, 0, flat, rows), made)


_ADDING: Mapping[Any, Callable[[fx.Graph, fx.Node, fx.Node], fx.Node | None]] = {
    _ATEN.mm.default: _matrix,
    _ATEN.bmm.default: _matrices,
    _ATEN.embedding_dense_backward.default: _rows,
}
"""Operators with a form that adds to what is there."""
