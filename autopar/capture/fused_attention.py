"""Attention that torch has no kernel for on the CPU, as one: of uneven heads, with dropped scores or a trained mask.

    queries, keys [..., 192], values [..., 128]   →   values [..., 192], of whose result the first 128 are read
    attention(q, k, v, dropout_p=0.1)             →   autopar_ops._scaled_dot_product_block_attention(q, k, v, 0.1)
    attention(q, k, v, bias)                      →   ..._block_attention(q, k, v, 0.0, False, bias) if bias is trained

Without a kernel torch falls back to plain operators, which keep a score for every two tokens. Zeros add nothing to a
score and nothing to what is read of a value: where torch's kernels have one size for all three (latent attention:
DeepSeek-V2 and its descendants), libraries pad for flash attention in the same way. Dropped scores and gradients of
masks (relative positions, the pairs of structure models) the kernels of GPUs have, and the CPU is given one
(`own_attention.py`). Calls that have no dimension of heads stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.nn import functional

from autopar.capture.autocasting import as_products_read
from autopar.own_attention import BLOCK_ATTENTION

_ATTENTION = functional.scaled_dot_product_attention


@contextmanager
def fused_attention(graph: fx.GraphModule) -> Iterator[None]:
    """Let attention of a graph of Dynamo's become one kernel where it is differentiated in this context.

    Torch's own function of several heads, which is a call in that graph, calls attention by its name.
    """
    for node in graph.graph.find_nodes(op="call_function", target=_ATTENTION):
        node.target = _attend
    graph.recompile()
    with patch.object(functional, "scaled_dot_product_attention", _attend):
        yield


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what the attention is, of heads of two sizes on padded ones."""
    size, wanted = query.shape[-1], value.shape[-1]
    in_blocks = bool(dropout_p) or (attn_mask is not None and attn_mask.requires_grad)
    fits = _in_blocks(query, key, value, dropout_p, enable_gqa) if in_blocks else query.dim() == 4 and size != wanted
    if not fits:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scale = 1.0 / math.sqrt(size) if scale is None else scale
    if size != wanted:
        more = size - wanted
        query, key, value = (
            functional.pad(each, (0, by)) if by > 0 else each
            for each, by in ((query, -more), (key, -more), (value, more))
        )
    if in_blocks:
        found = _block_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    else:
        found = _ATTENTION(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return found if size == wanted else found[..., :wanted]


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, dropout: float, grouped: bool) -> bool:
    """Return whether the kernel that works in blocks takes a call: heads in groups, and some scores left."""
    if not 0.0 <= dropout < 1.0 or query.dim() != 4 or key.shape[:3] != value.shape[:3]:
        return False
    heads, shared = query.shape[1], key.shape[1]
    return query.shape[0] == key.shape[0] and (heads == shared or (grouped and shared > 0 and heads % shared == 0))


def _block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return attention of that kernel; as torch's own, it casts under autocast and reads True as a score of 0."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -math.inf)
    query, key, value = map(as_products_read, (query, key, value))
    mask = None if mask is None else as_products_read(mask)
    out: Tensor = BLOCK_ATTENTION(query, key, value, dropout, causal, mask, scale=scale)[0]
    return out
