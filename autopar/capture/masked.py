"""Writes to the places that a mask tells, as a choice at every place, for which every split has a rule.

    x[mask] = value        →        x.copy_(where(mask, value, x))

where the same value goes to all places (a number, a learned vector). Indexing by a mask finds the places first, and
how many there are depends on the data: the value's gradient would have no static shape. So for values that are
computed of what stands at the same places:

    x[mask] += y[mask]     →        x.copy_(where(mask, where(mask, x, 1) + where(mask, y, 1), x))

Places found first are the mask again: `x[torch.where(mask)]` is `x[mask]`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_IN_PLACE = frozenset({"index_put_"})
_METHODS = frozenset({"index_put", "index_put_"})


def masks_for_places(graph: fx.GraphModule) -> int:
    """Index by a mask itself where all places that it tells are the index, in a graph of Dynamo's; return how often."""
    changed = 0
    for node in list(graph.graph.nodes):
        indexes = node.target in {operator.getitem, operator.setitem, torch.index_put} or node.target in _METHODS
        mask = _mask_of_places(node.args[1], node) if indexes and len(node.args) > 1 else None
        if mask is None:
            continue
        by_syntax = node.target in {operator.getitem, operator.setitem}
        node.args = (node.args[0], mask if by_syntax else (mask,), *node.args[2:])
        changed += 1
    if changed:
        for node in reversed(graph.graph.nodes):
            if not node.users and (_finds_places(node) or (_is_part(node) and _finds_places(node.args[0]))):
                graph.graph.erase_node(node)
        graph.recompile()
    return changed


def _mask_of_places(index: Any, user: fx.Node) -> fx.Node | None:
    """Return the mask whose places, one tensor a dimension, an index consists of; `None` if it may have changed."""
    parts = index if isinstance(index, tuple | list) else ()
    sources = {each.args[0] if _is_part(each) else None for each in parts}
    source = sources.pop() if len(sources) == 1 else None
    if not (isinstance(source, fx.Node) and _finds_places(source)) or _changed_between(user, [source]):
        return None
    mask = source.args[0]
    seen = _known(mask)
    in_order = [each.args[1] for each in parts] == list(range(seen.dim()))
    return mask if isinstance(mask, fx.Node) and seen.dtype is torch.bool and in_order else None


def _is_part(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is operator.getitem and isinstance(node.args[1], int)


def _finds_places(node: fx.Node) -> bool:
    """Return whether a node is `where(mask)` or `nonzero(mask, as_tuple=True)`."""
    if node.target is torch.where:
        return len(node.args) == 1 and not node.kwargs
    return node.target in {torch.nonzero, "nonzero"} and node.kwargs == {"as_tuple": True} and len(node.args) == 1


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


def compute_everywhere(graph: fx.GraphModule) -> int:
    """Compute what is read and written by one mask at every place instead, in a graph of Dynamo's; return how many.

    At the other places it is computed of ones and not used; what is infinite there would make its gradients NaN.
    """
    changed = 0
    for node in list(graph.graph.nodes):
        written = _written(node)
        if written is None:
            continue
        into, index, value = written
        if not (isinstance(index, fx.Node) and isinstance(value, fx.Node)) or not _is_mask_of(index, into):
            continue
        steps = _steps_between(value, index, into)
        if steps is None or _changed_between(node, steps):
            continue
        with graph.graph.inserting_before(node):
            known = _computed_of_all(graph.graph, steps, index)
        in_place = node.target is operator.setitem or node.target in _IN_PLACE
        node.op, node.target = "call_function", _choose_computed_in_place if in_place else _choose_computed
        node.args, node.kwargs = (into, index, known[value]), {}
        for step in (node, *known.values()):
            step.meta = {name: each for name, each in node.meta.items() if name == "stack_trace"}
        for step in reversed(steps):
            if not step.users:
                graph.graph.erase_node(step)
        changed += 1
    if changed:
        graph.recompile()
    return changed


_OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_PARTIAL: frozenset[Any] = frozenset(
    {operator.truediv, operator.itruediv, torch.div, torch.log, torch.sqrt, "div", "log", "sqrt"}
)
"""Functions that, or whose derivatives, are infinite where their (last) argument is 0."""

_ELEMENTWISE: frozenset[Any] = _PARTIAL | {
    *_OUT_OF_PLACE, *_OUT_OF_PLACE.values(), operator.neg,
    torch.abs, torch.add, torch.clamp, torch.cos, torch.exp, torch.mul, torch.neg, torch.relu, torch.sigmoid, torch.sin,
    torch.square, torch.sub, torch.tanh,
    "abs", "add", "clamp", "cos", "detach", "exp", "mul", "neg", "relu", "sigmoid", "sin", "square", "sub", "tanh",
}  # fmt: skip


def _computed_of_all(graph: fx.Graph, steps: list[fx.Node], mask: fx.Node) -> dict[fx.Node, fx.Node]:
    """Return, by step, a new node that computes the same at every place."""
    known: dict[fx.Node, fx.Node] = {}
    for step in steps:
        if _is_read(step, mask):
            known[step] = graph.call_function(_ones_elsewhere, (step.args[0], mask))
        else:
            args, kwargs = fx.map_arg((step.args, dict(step.kwargs)), lambda each: known.get(each, each))
            known[step] = graph.create_node(step.op, _OUT_OF_PLACE.get(step.target, step.target), args, kwargs)
    return known


def _is_mask_of(index: fx.Node, into: Any) -> bool:
    """Return whether a node is a mask over the leading dimensions of a tensor."""
    mask, tensor = _known(index), _known(into)
    if not (isinstance(mask, torch.Tensor) and isinstance(tensor, torch.Tensor) and mask.dtype is torch.bool):
        return False
    return 0 < mask.dim() <= tensor.dim() and mask.shape == tensor.shape[: mask.dim()]


def _is_read(node: fx.Node, mask: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem and node.args[1] is mask


def _steps_between(value: fx.Node, mask: fx.Node, into: Any) -> list[fx.Node] | None:
    """Return the nodes that compute a value, in order, of what a mask reads; `None` if it is made otherwise."""
    found: set[fx.Node] = set()
    pending = [value]
    behind = _known(into).dim() - _known(mask).dim()
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if _is_read(node, mask):
            read = node.args[0]
            if not _is_mask_of(mask, read) or _known(read).dim() != _known(into).dim():
                return None
            continue
        if node.op not in {"call_function", "call_method"} or node.target not in _ELEMENTWISE:
            return None
        last = node.args[-1]
        if node.target in _PARTIAL and isinstance(last, fx.Node) and not _is_read(last, mask):
            return None
        for each in node.all_input_nodes:
            known = _known(each)
            if isinstance(known, torch.Tensor) and _is_counted(known):
                pending.append(each)
            elif not isinstance(known, torch.Tensor) or known.dim() > behind:
                return None
    order = [node for node in value.graph.nodes if node in found]
    return order if any(_is_read(each, mask) for each in order) else None


def _is_counted(tensor: torch.Tensor) -> bool:
    """Return whether a size of a tensor depends on data."""
    return any(not isinstance(size, int) for size in tensor.shape)


def _changed_between(write: fx.Node, steps: list[fx.Node]) -> bool:
    """Return whether something is written in place between the first of the steps and the write, other than they."""
    node = steps[0]
    while node is not write:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        in_place = (
            node.target is operator.setitem
            or node.target in _OUT_OF_PLACE
            or (name.endswith("_") and not name.endswith("__"))
        )
        if in_place and node not in steps:
            return True
        node = node.next
    return False


def _ones_elsewhere(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(_over(mask, tensor), tensor, torch.ones((), dtype=tensor.dtype, device=tensor.device))


def _over(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask over leading dimensions as one that broadcasts to the tensor."""
    return mask.reshape(*mask.shape, *(1,) * (tensor.dim() - mask.dim()))


def _choose_computed(into: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.where(_over(mask, into), value.to(into.dtype), into)


def _choose_computed_in_place(into: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return into.copy_(_choose_computed(into, mask, value))


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
