"""Writes to the places that a mask tells, as a choice at every place, for which every split has a rule.

    x[mask] = value        →        x.copy_(where(mask, value, x))

where the same value goes to all places (a number, a learned vector). Indexing by a mask finds the places first, and
how many there are depends on the data: the value's gradient would have no static shape.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_IN_PLACE = frozenset({"index_put_"})
_METHODS = frozenset({"index_put", "index_put_"})


def choose_by_masks(graph: fx.GraphModule) -> int:
    """Replace writes by a mask in a graph of Dynamo's where the value is the same at all places; return how many."""
    changed = 0
    for node in graph.graph.nodes:
        written = _written(node)
        if written is None or _place(*(_known(each) for each in written)) is None:
            continue
        in_place = node.target is operator.setitem or node.target in _IN_PLACE
        node.op, node.target = "call_function", _choose_in_place if in_place else _choose
        node.args, node.kwargs = written, {}
        changed += 1
    if changed:
        graph.recompile()
    return changed


def counting_write(graph: fx.GraphModule) -> fx.Node | None:
    """Return the first write by a mask whose value has a gradient, as large as the mask has places; `None` without."""
    nodes: list[fx.Node] = list(graph.graph.nodes)
    for node in nodes:
        written = _written(node)
        if written is None:
            continue
        _, index, value = map(_known, written)
        parts = index if isinstance(index, tuple | list) else (index,)
        by_mask = any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)
        if by_mask and isinstance(value, torch.Tensor) and value.requires_grad:
            return node
    return None


def _written(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """Return the tensor, the index and the value of a write; `None` for other nodes and for sums."""
    is_write = node.op == "call_function" and node.target in {operator.setitem, torch.index_put}
    is_method = node.op == "call_method" and node.target in _METHODS
    if not (is_write or is_method) or len(node.args) != 3 or node.kwargs:
        return None
    into, index, value = node.args
    return into, index, value


def _known(value: Any) -> Any:
    """Return an argument of a node with fake tensors in the place of nodes."""
    return fx.map_arg(value, lambda node: node.meta.get("example_value"))


def _place(into: Any, index: Any, value: Any) -> tuple[int, int] | None:
    """Return before how many dimensions the mask stands, and how many it has; `None` if this is no choice."""
    parts = list(index) if isinstance(index, tuple | list) else [index]
    before = next((at for at, part in enumerate(parts) if part != slice(None)), len(parts))
    mask, *after = parts[before:] or [None]
    if not (isinstance(into, torch.Tensor) and isinstance(mask, torch.Tensor) and mask.dtype is torch.bool):
        return None
    dims = mask.dim()
    after_is_whole = all(part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in after)
    if not (after_is_whole and dims > 0 and mask.shape == into.shape[before : before + dims]):
        return None
    if isinstance(value, bool | int | float):
        is_cut_off = isinstance(value, float) and not (into.is_floating_point() or into.is_complex())
        return None if is_cut_off else (before, dims)
    if not isinstance(value, torch.Tensor):
        return None
    behind = into.dim() - before - dims
    one_for_all = value.dim() <= behind or value.shape[value.dim() - behind - 1] == 1
    return (before, dims) if one_for_all else None


def _choose_in_place(into: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    return into.copy_(_choose(into, index, value))


def _choose(into: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    place = _place(into, index, value)
    if place is None:
        raise ValueError("the mask or the value has another shape than where the program was read")
    before, dims = place
    behind = into.dim() - before - dims
    mask = (index[before] if isinstance(index, tuple | list) else index).reshape(
        *(1,) * before, *into.shape[before : before + dims], *(1,) * behind
    )
    if not isinstance(value, torch.Tensor):
        return into.masked_fill(mask, value)
    if value.dim() > behind:
        split = value.dim() - behind
        value = value.reshape(*value.shape[: split - 1], *(1,) * dims, *value.shape[split:])
    return torch.where(mask, value.to(into.dtype), into)
