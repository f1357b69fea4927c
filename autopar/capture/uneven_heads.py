"""Attention whose values are of another size than its queries and keys, padded such that fused kernels take it.

    queries, keys [..., 192], values [..., 128]   →   values [..., 192], of whose result the first 128 are read

Zeros add nothing to a score and nothing to what is read of a value. Without them torch falls back to plain operators,
which keep a score for every two tokens, where its kernels have one size for all three (latent attention: DeepSeek-V2
and its descendants); libraries pad for flash attention in the same way. Where no fused kernel is to be had, calls stay
as they are: those that drop scores at random, have a mask that is trained, or no dimension of heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS: dict[str, Any] = {
    "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
}  # fmt: skip


def pad_heads(graph: fx.GraphModule) -> int:
    """Replace attention of uneven heads in a graph of Dynamo's by padded attention; return how often."""
    padded = 0
    for node in graph.graph.find_nodes(op="call_function", target=functional.scaled_dot_product_attention):
        call = _DEFAULTS | dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
        query, value, mask = (_made(call[name]) for name in ("query", "value", "attn_mask"))
        if query is None or value is None or query.dim() != 4 or query.shape[-1] == value.shape[-1]:
            continue
        if call["dropout_p"] or (mask is not None and mask.requires_grad):
            continue
        node.target, node.args, node.kwargs = _padded, (), call
        padded += 1
    if padded:
        graph.recompile()
    return padded


def _made(argument: Any) -> Tensor | None:
    """Return the example of what an argument is."""
    found = argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument
    return found if isinstance(found, torch.Tensor) else None


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return what the attention of heads of two sizes is."""
    size, wanted = query.shape[-1], value.shape[-1]
    more = size - wanted
    query, key, value = (
        functional.pad(each, (0, by)) if by > 0 else each for each, by in ((query, -more), (key, -more), (value, more))
    )
    scale = 1.0 / math.sqrt(size) if scale is None else scale
    found = functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return found[..., :wanted]
