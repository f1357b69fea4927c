"""Norms of 16-bit values by weights of float32, which CPUs compute and GPUs refuse."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.rewrite.beside import beside

_ATEN = torch.ops.aten


class _Places(NamedTuple):
    """Which arguments of a norm, or of its backward, are values and which weights; its first result is a value."""

    values: tuple[int, ...]
    weights: tuple[int, ...]


_NORMS: Mapping[Any, _Places] = {
    _ATEN.native_layer_norm.default: _Places((0,), (2, 3)),
    _ATEN.native_layer_norm_backward.default: _Places((0, 1), (5, 6)),
    _ATEN.native_group_norm.default: _Places((0,), (1, 2)),
    _ATEN.native_group_norm_backward.default: _Places((0, 1), (4,)),
    _ATEN._fused_rms_norm.default: _Places((0,), (2,)),
    _ATEN._fused_rms_norm_backward.default: _Places((0, 1), (4,)),
}


@dataclass(frozen=True, slots=True)
class MixedNorms:
    """Let norms whose weights are wider than their values compute in the weights' type, as on the CPU.

    layer_norm(x16, w32)   →   _to_copy(x16, 32) → layer_norm(·, w32) → _to_copy(·, 16)

    GPUs' kernels want all of one type; weights in 16 bits would be others than the model's.
    """

    def __call__(self, gm: fx.GraphModule) -> int:
        """Edit the graph and return the number of norms changed."""
        return sum(
            _widened(node, places)
            for target, places in _NORMS.items()
            for node in gm.graph.find_nodes(op="call_function", target=target)
        )


def _widened(node: fx.Node, places: _Places) -> bool:
    target: Any = node.target
    args: list[Any] = list(node.args)
    values, weights = (
        [args[at].meta["val"].dtype for at in of if at < len(args) and isinstance(args[at], fx.Node)] for of in places
    )
    if not weights or set(values) == set(weights):
        return False
    dtype, before = max(weights, key=lambda each: each.itemsize), values[-1]
    for at in (*places.values, *places.weights):
        each = args[at] if at < len(args) else None
        if isinstance(each, fx.Node) and each.meta["val"].dtype != dtype:
            args[at] = beside(node, _ATEN._to_copy.default, (each,), {"dtype": dtype})
    new = beside(node, target, tuple(args), dict(node.kwargs))
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    for user in [each for each in new.users if each.target is operator.getitem]:
        user.meta["val"] = new.meta["val"][user.args[1]]
        user.meta.pop("local_shape", None)
        if user.args[1] == 0 and before != dtype:
            _cast(user, before)
    return True


def _cast(value: fx.Node, dtype: torch.dtype) -> None:
    """Let all readers of a value read it in a type."""
    with value.graph.inserting_after(value):
        cast = value.graph.call_function(_ATEN._to_copy.default, (value,), {"dtype": dtype})
    cast.meta = {**value.meta, "val": value.meta["val"].to(dtype)}
    value.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
