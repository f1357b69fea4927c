"""Attention that drops scores or trains its mask, as one kernel: `autopar_ops::_scaled_dot_product_block_attention`.

    queries [b, h, l, e], keys and values [b, h, s, e]   →   out [b, h, l, e], logsumexp [b, h, l], state [b, h]

GPUs have such kernels, CPUs have none: there torch keeps all scores, and which were dropped. A program is captured on
the CPU and has this operator, for which the rewriter puts a GPU's kernel. On the CPU it computes block by block and
draws again in backward what forward drew, from the number in `state`; so no tensor of the size of all scores is made.

What was drawn depends on the part of the heads that a kernel had. Backward must have the same part: the dims of `state`
say which that is, though all of its elements are one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK_SCORES = 1 << 18
"""Scores that the CPU works on at a time: what a core's cache holds."""

_STEPS = 1 << 16
"""Probabilities are multiples of one over it: 16 random bits decide of a score."""

_READS = "Tensor query, Tensor key, Tensor value"
_HOW = "float dropout_p, bool is_causal, Tensor? attn_mask=None"
_LIBRARY: Any = torch.library.Library("autopar_ops", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    f"_scaled_dot_product_block_attention({_READS}, {_HOW}, *, float? scale=None) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.define(
    f"_scaled_dot_product_block_attention_backward(Tensor grad_out, {_READS}, Tensor out, Tensor logsumexp, "
    f"Tensor state, {_HOW}, int trains_mask=0, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)"
)


class _Block(NamedTuple):
    """Some heads of some samples, and some queries of theirs."""

    of_queries: tuple[slice, slice, slice]
    of_keys: tuple[slice, slice, slice]
    """A block of a causal mask leaves out the keys behind its last query."""


class _Scores:
    """The scores of one call, block by block; equal calls draw alike."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        dropout: float,
        causal: bool,
        mask: Tensor | None,
        scale: float | None,
        seed: int,
    ) -> None:
        self._query, self._key, self._causal = query, key, causal
        self.scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        shape = (*query.shape[:3], key.shape[2])
        self._mask = None if mask is None else mask.expand(shape)
        self.groups = query.shape[1] // key.shape[1]
        self.dtype = sums_in(query.dtype)
        self._dropped = round(dropout * _STEPS)
        self.drops = dropout > 0.0
        self.kept = 1.0 - self._dropped / _STEPS
        self._random = torch.Generator().manual_seed(seed)

    def blocks(self) -> Iterator[_Block]:
        """Yield the blocks: whole samples if several fit, else heads of one sample, else queries of one group."""
        samples, heads, length, keys = *self._query.shape[:3], self._key.shape[2]
        shared = self._key.shape[1]
        rows = _clamped(BLOCK_SCORES // max(1, self.groups * keys), length)
        some = _clamped(BLOCK_SCORES // max(1, self.groups * keys * length), shared) if rows == length else 1
        batch = _clamped(BLOCK_SCORES // max(1, heads * keys * length), samples) if some == shared else 1
        for first in range(0, samples, batch):
            for head in range(0, shared, some):
                for row in range(0, length, rows):
                    here, of_keys = slice(first, first + batch), slice(head, head + some)
                    of_heads = slice(head * self.groups, (head + some) * self.groups)
                    seen = min(keys, row + rows) if self._causal else keys
                    yield _Block((here, of_heads, slice(row, row + rows)), (here, of_keys, slice(0, seen)))

    def read(self, tensor: Tensor, at: tuple[slice, slice, slice]) -> Tensor:
        """Return a block of queries, keys or values as products are summed; keys once for each query head."""
        found = tensor[at].to(self.dtype)
        return found if tensor.shape[1] == self._query.shape[1] else found.repeat_interleave(self.groups, dim=1)

    def of_heads(self, gradient: Tensor) -> Tensor:
        """Return a gradient of keys or values, summed over the queries' heads that share one."""
        if self.groups == 1:
            return gradient
        samples, heads, *rest = gradient.shape
        return gradient.view(samples, heads // self.groups, self.groups, *rest).sum(2)

    def scores(self, block: _Block) -> Tensor:
        """Return a block of masked scores."""
        found = self.read(self._query, block.of_queries) @ self.read(self._key, block.of_keys).mT
        found *= self.scale
        rows, keys = block.of_queries[2], block.of_keys[2]
        if self._mask is not None:
            found += self._mask[block.of_queries][..., keys]
        if self._causal:
            seen = torch.arange(keys.stop) <= torch.arange(rows.start, rows.start + found.shape[2])[:, None]
            found.masked_fill_(~seen, -math.inf)
        return found

    def keeps(self, scores: Tensor) -> Tensor:
        """Return which scores of a block are kept; blocks must be asked in order."""
        words = torch.empty(-(-scores.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=self._random)
        return (words.view(torch.int16)[: scores.numel()] >= self._dropped - _STEPS // 2).view(scores.shape)

    def add_to_mask(self, total: Tensor, block: _Block, gradient: Tensor) -> None:
        """Add the gradient of a block of scores to that of a mask of four dims, summed where the mask is the same."""
        places = (*block.of_queries, block.of_keys[2])
        alike = [dim for dim in range(4) if total.shape[dim] == 1]
        own = tuple(slice(None) if dim in alike else place for dim, place in enumerate(places))
        total[own] += gradient.sum(alike, keepdim=True) if alike else gradient


def _clamped(count: int, most: int) -> int:
    return min(max(1, count), max(1, most))


def sums_in(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the sums of attention over such elements."""
    return torch.float32 if dtype in {torch.bfloat16, torch.float16} else dtype


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    seed = int(torch.randint(2**62, (), dtype=torch.int64)) if dropout_p else 0
    out, sums, state = _shapes(query)
    state.fill_(seed)
    of = _Scores(query, key, dropout_p, is_causal, attn_mask, scale, seed)
    for block in of.blocks():
        scores = of.scores(block)
        largest = scores.amax(-1, keepdim=True)
        largest.masked_fill_(largest == -math.inf, 0.0)  # a query that sees no key reads nothing
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        if of.drops:
            weights *= of.keeps(weights)
        read = weights @ of.read(value, block.of_keys)
        out[block.of_queries] = read.div_(total.clamp_min(torch.finfo(total.dtype).tiny) * of.kept).to(out.dtype)
        sums[block.of_queries] = (largest + total.log()).squeeze(-1)
    return out, sums, state


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    state: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None = None,
    trains_mask: int = 0,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and mask (FlashAttention, Dao et al. 2022, algorithm 4).

    That of a mask that is not trained is empty. `trains_mask` is a number, 1 or 0: a captured kernel of attention that
    is given True is a causal one.
    """
    of = _Scores(query, key, dropout_p, is_causal, attn_mask, scale, int(state.flatten()[0]) if state.numel() else 0)
    made = torch.empty_like(query)
    sums = [torch.zeros_like(each, dtype=of.dtype) for each in (key, value)]
    logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    of_mask = _of_mask(query, attn_mask if trains_mask else None).to(of.dtype).zero_()
    total = of_mask.view((1,) * (4 - of_mask.dim()) + of_mask.shape)
    for block in of.blocks():
        weights = of.scores(block).sub_(logsumexp[block.of_queries].unsqueeze(-1)).exp_()
        keeps = of.keeps(weights) if of.drops else torch.ones((), dtype=torch.bool)
        grad = of.read(grad_out, block.of_queries)
        inner = (grad * of.read(out, block.of_queries)).sum(-1, keepdim=True)
        sums[1][block.of_keys] += of.of_heads((weights * keeps).mT @ grad).div_(of.kept)
        of_scores = grad @ of.read(value, block.of_keys).mT
        of_scores.mul_(keeps).div_(of.kept).sub_(inner).mul_(weights)
        if trains_mask:
            of.add_to_mask(total, block, of_scores)
        made[block.of_queries] = (of_scores @ of.read(key, block.of_keys)).mul_(of.scale).to(made.dtype)
        sums[0][block.of_keys] += of.of_heads(of_scores.mT @ of.read(query, block.of_queries)).mul_(of.scale)
    return (
        made,
        sums[0].to(key.dtype),
        sums[1].to(value.dtype),
        of_mask.to(query.dtype if attn_mask is None else attn_mask.dtype),
    )


def _of_mask(query: Tensor, mask: Tensor | None) -> Tensor:
    """Return memory for the gradient of a mask."""
    return query.new_empty(0) if mask is None else mask.new_empty(mask.shape)


def _shapes(query: Tensor, *_: Any, **__: Any) -> Any:
    sums = query.new_empty(query.shape[:3], dtype=sums_in(query.dtype))
    return torch.empty_like(query), sums, query.new_empty(query.shape[:2], dtype=torch.int64)


def _gradient_shapes(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    state: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None = None,
    trains_mask: int = 0,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_mask = _of_mask(query, attn_mask if trains_mask else None)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_mask


def _saved(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    *tensors, dropout, causal, mask = inputs
    ctx.save_for_backward(*tensors, *output, mask)
    ctx.how = dropout, causal, keyword_only_inputs["scale"]


def _differentiated(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    *tensors, mask = ctx.saved_tensors
    dropout, causal, scale = ctx.how
    backward = torch.ops.autopar_ops._scaled_dot_product_block_attention_backward
    trains = int(mask is not None and ctx.needs_input_grad[5])
    *found, of_mask = backward(grad, *tensors, dropout, causal, mask, trains, scale=scale)
    return *found, None, None, of_mask if trains else None


for _name, _run, _fake in (
    ("_scaled_dot_product_block_attention", _forward, _shapes),
    ("_scaled_dot_product_block_attention_backward", _backward, _gradient_shapes),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar_ops::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd(
    "autopar_ops::_scaled_dot_product_block_attention", _differentiated, setup_context=_saved, lib=_LIBRARY
)

BLOCK_ATTENTION: Any = torch.ops.autopar_ops._scaled_dot_product_block_attention.default
BLOCK_ATTENTION_BACKWARD: Any = torch.ops.autopar_ops._scaled_dot_product_block_attention_backward.default
