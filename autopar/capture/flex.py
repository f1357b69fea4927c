"""`flex_attention` as plain operators: what is captured is a program for CPU, where torch has no backward of it.

    flex_attention(q, k, v, block_mask=m)             →     scaled_dot_product_attention(q, k, v, attn_mask=M)
    flex_attention(q, k, v, score_mod=f, ...)         →     softmax(where(M, f(q @ k.mT * scale), -inf)) @ v

`M` is the mask function at every place, of as many samples and heads as the block mask was made for. It is a tensor of
the program like any other, so what it reads (the documents of a packed batch, say) may be inputs; where it is made of
constants alone, `masks.py` finds the causal one. Not modelled: that the fused kernel skips blocks that are masked whole
and keeps no scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from autopar._torch import flex_attention as library


@contextmanager
def flex_attention_in_plain_operators() -> Iterator[None]:
    """Let Dynamo read `flex_attention` as the operators it stands for."""
    with (
        patch.object(library, "_validate_device", lambda *_: None),
        patch.object(library, "flex_attention_hop", _plain),
    ):
        yield


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the higher-order operator does: the values, and logarithms of sums and maxima to base 2."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    groups = heads // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    blocks, mask_mod = block_mask[2], block_mask[-1]
    mask = None
    if mask_mod is not library.noop_mask:
        sizes = (blocks.shape[0], blocks.shape[1], queries, keys)
        mask = _everywhere(mask_mod, scores=())(*_places(sizes, query.device))
    if score_mod is library._identity and not options["OUTPUT_LOGSUMEXP"]:
        nothing = query.new_empty(0)
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale), nothing, nothing
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(exact) @ key.to(exact).transpose(-2, -1) * scale
    places = _places((batch, heads, queries, keys), query.device)
    scores = _everywhere(score_mod, scores=(0,))(scores, *places).to(exact)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    unseeing = (scores == -math.inf).all(-1, keepdim=True)  # a query that sees no key gets zeros
    seen = scores.masked_fill(unseeing, 0.0)
    weights = seen.softmax(-1).masked_fill(unseeing, 0.0)
    sums = seen.logsumexp(-1, keepdim=True).masked_fill(unseeing, -math.inf)
    found = weights.to(query.dtype) @ value.to(query.dtype)
    return found, sums.squeeze(-1) / math.log(2), scores.amax(-1) / math.log(2)


def _places(sizes: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Return the numbers of samples, heads, queries and keys."""
    return [torch.arange(size, device=device) for size in sizes]


def _everywhere(function: Callable[..., Tensor], scores: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return the function of one place (after one score, with `scores`) for all places along four dimensions."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=scores + dims)
    return function
