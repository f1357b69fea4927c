"""Arguments that an operator is given and does not read, which nothing should be gathered or kept for."""

from __future__ import annotations

import torch
from torch import fx

_BATCH_NORM = torch.ops.aten.native_batch_norm_backward.default
_WEIGHT, _WANTED = 2, 9


def drop_unread(joint: fx.GraphModule) -> int:
    """Leave the weight out of a batch norm's backward that gives no gradient of its input; return how many.

    The gradients of weight and bias are sums of what was normalised: only the input's is scaled by the weight.
    """
    dropped = 0
    for node in joint.graph.find_nodes(op="call_function", target=_BATCH_NORM):
        wanted = node.args[_WANTED]
        if isinstance(wanted, list | tuple) and not wanted[0] and node.args[_WEIGHT] is not None:
            node.update_arg(_WEIGHT, None)
            dropped += 1
    return dropped
