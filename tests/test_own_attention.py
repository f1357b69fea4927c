"""Attention that drops scores: its numbers by definition, whatever blocks it works in."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autopar import own_attention
from autopar.own_attention import BLOCK_ATTENTION, BLOCK_ATTENTION_BACKWARD

DROPPED = 0.3
BLOCKS = (own_attention.BLOCK_SCORES, 200, 50, 7)
"""Scores of a block: all samples, some samples, some heads of one, some queries of one head."""

CALLS = {
    "plain": (4, 4, 5, 7, False, False),
    "causal": (4, 4, 6, 6, True, False),
    "causal, more keys": (2, 2, 3, 5, True, False),
    "queries share keys": (4, 2, 6, 6, True, False),
    "mask": (4, 2, 5, 7, False, True),
    "mask, all heads": (4, 4, 5, 7, False, True),
}
"""Heads of queries, heads of keys, queries, keys, whether causal, whether there is a mask."""


TRAINED = {"rows": (5, 7), "heads": (4, 5, 7), "samples": (3, 1, 5, 7), "all": (3, 4, 5, 7), "keys": (1, 7)}


def tensors(heads: int, shared: int, queries: int, keys: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((heads, queries), (shared, keys), (shared, keys))
    return [torch.randn(3, head, length, 8, dtype=dtype, requires_grad=True) for head, length in sizes]


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, ...]:
    """Return what the kernel makes with one seed."""
    torch.manual_seed(1)
    made: tuple[Tensor, ...] = BLOCK_ATTENTION(query, key, value, DROPPED, causal, mask)
    return made


def kept(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    """Return which scores the seed keeps, whatever they are: those that reach a value which is 1 for one key alone."""
    keys = key.shape[2]
    ones = torch.eye(keys, dtype=key.dtype).expand(*key.shape[:2], keys, keys)
    return attend(query.new_zeros(*query.shape[:3], keys), torch.zeros_like(ones), ones, causal, mask)[0] != 0


def defined(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, keep: Tensor, dropped: float = DROPPED
) -> Tensor:
    """Return attention by its definition, given what is kept."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    scores = scores if mask is None else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return (weights * keep / (1 - round(dropped * 2**16) / 2**16)) @ value


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_the_definition(name: str, block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own_attention, "BLOCK_SCORES", block)
    *sizes, causal, masked = CALLS[name]
    given = tensors(*sizes)
    mask = torch.randn(sizes[2], sizes[3], dtype=torch.float64) if masked else None
    if mask is not None:
        mask[1] = -math.inf  # a query that sees nothing
    keep = kept(*given[:2], causal, mask)
    gradient = torch.randn_like(given[0])

    out, _, _ = attend(*given, causal, mask)
    want = defined(*given, causal, mask, keep)

    torch.testing.assert_close(out, want)
    found, wanted = (torch.autograd.grad(each, given, gradient) for each in (out, want))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dropped", [0.0, DROPPED])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_masks_are_those_of_the_definition(
    name: str, dropped: float, block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(own_attention, "BLOCK_SCORES", block)
    query, key, value = tensors(4, 2, 5, 7)
    mask = torch.randn(TRAINED[name], dtype=torch.float64, requires_grad=True)
    keep = kept(query, key, False, None) if dropped else torch.ones(3, 4, 5, 7, dtype=torch.bool)
    gradient = torch.randn_like(query)

    torch.manual_seed(1)
    out = BLOCK_ATTENTION(query, key, value, dropped, False, mask)[0]
    want = defined(query, key, value, False, mask, keep, dropped)

    torch.testing.assert_close(out, want)
    read = (query, key, value, mask)
    found, wanted = (torch.autograd.grad(each, read, gradient) for each in (out, want))
    torch.testing.assert_close(found, wanted)


def test_nothing_is_drawn_where_nothing_is_dropped():
    given = tensors(4, 4, 5, 7)
    before = torch.get_rng_state()
    BLOCK_ATTENTION(*given, 0.0, False)

    assert torch.equal(torch.get_rng_state(), before)


def test_each_score_is_dropped_with_the_probability_and_by_itself():
    query, key, _ = (each.detach() for each in tensors(4, 4, 100, 100, torch.float32))
    keep = kept(query, key, False, None).float()

    assert abs(keep.mean().item() - (1 - DROPPED)) < 0.01
    for dim in range(4):
        neighbours = keep.narrow(dim, 0, keep.shape[dim] - 1), keep.narrow(dim, 1, keep.shape[dim] - 1)
        both = (neighbours[0] * neighbours[1]).mean().item()
        assert abs(both - (1 - DROPPED) ** 2) < 0.01


def test_halves_are_summed_in_float32_and_gradients_are_of_their_own_type():
    query, key, value = tensors(4, 2, 6, 6, torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in (query, key, value)]

    out, sums, state = attend(query, key, value, True, None)
    want, _, _ = attend(*exact, True, None)

    assert (out.dtype, sums.dtype, state.dtype) == (torch.bfloat16, torch.float32, torch.int64)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)
    found = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    wanted = torch.autograd.grad(want, exact, torch.ones_like(want))
    for mine, its in zip(found, wanted, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), its, rtol=3e-2, atol=3e-2)


def test_fake_tensors_have_the_shapes_types_and_strides_of_real_ones():
    given = [each.detach().transpose(1, 2).contiguous().transpose(1, 2) for each in tensors(4, 2, 6, 6, torch.bfloat16)]
    made = BLOCK_ATTENTION(*given, DROPPED, True)
    made += BLOCK_ATTENTION_BACKWARD(made[0], *given, *made, DROPPED, True)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) for each in given]
        found = BLOCK_ATTENTION(*fake, DROPPED, True)
        found += BLOCK_ATTENTION_BACKWARD(found[0], *fake, *found, DROPPED, True)

    assert [(f.shape, f.dtype, f.stride()) for f in found] == [(m.shape, m.dtype, m.stride()) for m in made]
