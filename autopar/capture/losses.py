"""Cross entropy's backward as one operator, which makes one tensor of the logits' size instead of two."""

from __future__ import annotations

import torch
from torch import fx

from autopar.own_operators import CROSS_ENTROPY_BACKWARD

_ATEN = torch.ops.aten
_OF_LOSS = (_ATEN.nll_loss_backward.default, _ATEN.nll_loss2d_backward.default)


def merge_cross_entropy(joint: fx.GraphModule) -> int:
    """Replace each backward of `log_softmax` whose gradient is that of `nll_loss` alone; return how many.

        a = nll_loss_backward(grad, scores, target, ...)        b = _log_softmax_backward_data(a, scores, 1, dtype)
    becomes
        b = cross_entropy_backward(grad, scores, target, ...)
    """
    merged = 0
    for node in list(joint.graph.find_nodes(op="call_function", target=_ATEN._log_softmax_backward_data.default)):
        given, scores, dim, dtype = node.args
        value = scores.meta["val"]
        alone = given.target in _OF_LOSS and set(given.users) == {node} and _named(given.args[1]) is _named(scores)
        if not alone or value.dim() < 2 or dim % value.dim() != 1 or dtype != value.dtype:
            continue
        node.target, node.args = CROSS_ENTROPY_BACKWARD, given.args
        joint.graph.erase_node(given)
        merged += 1
    return merged


def _named(value: fx.Node) -> fx.Node:
    """Return the node that a value is another name of."""
    while value.target in (_ATEN.detach.default, _ATEN.alias.default):
        value = value.args[0]  # type: ignore[assignment]
    return value
