"""Tensors of equal elements that are made like an input: of its shape, and no longer of it.

    weights = torch.ones_like(targets)        →        weights = torch.full(targets.shape, 1)

Of an input each micro-batch has its own samples. What is made like it could be had of these alone, and the number of
all samples (`weights.sum()`) of none.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

_ATEN = torch.ops.aten
_FILLED = {
    _ATEN.ones_like.default: 1,
    _ATEN.zeros_like.default: 0,
    _ATEN.new_ones.default: 1,
    _ATEN.new_zeros.default: 0,
}


def make_by_shape(joint: fx.GraphModule, of_inputs: Collection[fx.Node]) -> int:
    """Make anew what is made like values `of_inputs` alone, by its shape; return how many."""
    changed = 0
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or node.target not in _FILLED or node not in of_inputs:
            continue
        made = node.meta["val"]
        if not made.is_contiguous():
            continue
        fill = _FILLED[node.target]
        value = bool(fill) if made.dtype is torch.bool else float(fill) if made.dtype.is_floating_point else fill
        node.target, node.args = _ATEN.full.default, (list(made.shape), value)
        node.kwargs = {"dtype": made.dtype, "device": made.device, "pin_memory": False}
        changed += 1
    return changed
