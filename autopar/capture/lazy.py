"""Tensors that torch leaves unwritten behind a mark (conjugated, negated, all zero) are written.

    x.conj(), and the gradient of a complex product: a view of the same memory that kernels read as conjugated

Kernels know such marks; what sends memory from rank to rank, or keeps it for later, does not. Torch's tracer leaves a
number in the place of a tensor that stands for one, `_conj(1j)`, which no operator of one tensor takes: it is made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar._torch import pytree

_ATEN = torch.ops.aten
_WRITTEN = {
    _ATEN._conj.default: _ATEN._conj_physical.default,
    _ATEN._neg_view.default: _ATEN.neg.default,
    _ATEN._efficientzerotensor.default: _ATEN.zeros.default,
}
_OF_NUMBERS: dict[Any, Callable[[complex], complex]] = {
    _ATEN._conj.default: lambda number: number.conjugate(),
    _ATEN._neg_view.default: operator.neg,
}


def write_lazy_tensors(joint: fx.GraphModule) -> int:
    """Replace each operator that only marks its result by the one that writes it; return how many."""
    changed = 0
    for node in joint.graph.nodes:
        if node.op == "call_function" and node.target in _WRITTEN:
            value = _OF_NUMBERS.get(node.target)
            if value is not None and not isinstance(node.args[0], fx.Node):
                node.target, node.args = _ATEN.scalar_tensor.default, (value(node.args[0]),)
                node.kwargs = {"dtype": node.meta["val"].dtype}
            else:
                node.target = _WRITTEN[node.target]
            changed += 1
    if changed:
        for node in joint.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map_only(torch.Tensor, _unmarked, node.meta["val"])
    return changed


def _unmarked(value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the same shape and strides whose memory is what it says."""
    if not (value.is_conj() or value.is_neg() or value._is_zerotensor()):
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
