"""Passes that take out operators which do nothing; every value stays the same bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._torch import storage_key
from autopar.rewrite.derived import is_view
from autopar.rewrite.marks import is_own

_ATEN = torch.ops.aten
_SAME_IF_SHAPE_IS = (_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default, _ATEN.expand.default)
_NAMES = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default)


@dataclass(frozen=True, slots=True)
class DropIdentities:
    """Replace what only renames a tensor by the tensor.

        detach(x)   view(x, its own shape)   contiguous(x), if it is   t(t(x))
    become
        x

    What the program returns keeps its last operator, so that no two results are one tensor; and an alias
    that the program itself does not have stays, since other ranks may have something else in its place.
    """

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators replaced."""
        output = next(iter(gm.graph.find_nodes(op="output")))
        dropped = 0
        for node in list(gm.graph.nodes):
            source = _renamed(node)
            if source is None or output in node.users:
                continue
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
            dropped += 1
        return dropped


def _renamed(node: fx.Node) -> fx.Node | None:
    """Return the node that `node` is another name of."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    same = before.shape == after.shape and before.stride() == after.stride()
    if node.target in _NAMES and same and is_own(node):
        return source
    if node.target in _SAME_IF_SHAPE_IS and same:
        return source
    if node.target is _ATEN.contiguous.default and before.is_contiguous() and len(node.args) == 1 and not node.kwargs:
        return source
    if node.target is _ATEN.t.default and source.target is _ATEN.t.default:
        return source.args[0] if isinstance(source.args[0], fx.Node) else None
    return None


@dataclass(frozen=True, slots=True)
class MergeEqualViews:
    """Keep one of several equal views of a tensor.

    Views that a redistribution or lowering made are left alone: two may be equal on one rank and not on another.
    """

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators replaced."""
        output = next(iter(gm.graph.find_nodes(op="output")))
        first: dict[Any, fx.Node] = {}
        merged = 0
        for node in list(gm.graph.nodes):
            if not is_own(node) or node.kwargs or not is_view(str(node.target)):
                continue
            if isinstance(node.meta.get("val"), list | tuple):
                continue
            key = (node.target, repr(node.args))
            known = first.setdefault(key, node)
            if known is node or output in node.users:
                continue
            node.replace_all_uses_with(known)
            gm.graph.erase_node(node)
            merged += 1
        return merged


@dataclass(frozen=True, slots=True)
class ViewWhatCanBeViewed:
    """Make each reshape a view where the local strides allow one: views cost less and say that nothing is copied."""

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators replaced."""
        changed = 0
        for node in gm.graph.find_nodes(op="call_function", target=_ATEN.reshape.default):
            source = node.args[0]
            if isinstance(source, fx.Node) and _shares_memory(source.meta["val"], node.meta["val"]):
                node.target = _ATEN.view.default
                changed += 1
        return changed


@dataclass(frozen=True, slots=True)
class DropUnreadStatistics:
    """Leave out the running statistics that the backward of a training BatchNorm is given and does not read.

    They would else be saved, and eager, which updates them in place, saves none.
    """

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of operators changed."""
        changed = 0
        for node in gm.graph.find_nodes(op="call_function", target=_ATEN.native_batch_norm_backward.default):
            trains = len(node.args) > 7 and node.args[7] is True
            if trains and any(each is not None for each in node.args[3:5]):
                node.args = (*node.args[:3], None, None, *node.args[5:])
                changed += 1
        return changed


def _shares_memory(before: torch.Tensor, after: torch.Tensor) -> bool:
    return storage_key(before) == storage_key(after)
