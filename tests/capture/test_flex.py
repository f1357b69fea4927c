"""`flex_attention` as plain operators: what it means, computed place by place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autopar.capture import capture
from autopar.errors import UsageError
from tests.capture.program import run

BATCH, HEADS, SEQ, DIM = 2, 2, 4, 4
Mod = Callable[..., Tensor]


class Flexible(nn.Module):
    """Attention of packed documents, whose mask is made in forward."""

    def __init__(self, score_mod: Mod | None, mask_mod: Mod | None, heads_of_keys: int, **options: Any) -> None:
        super().__init__()
        self.query, self.both = nn.Linear(8, HEADS * DIM), nn.Linear(8, 2 * heads_of_keys * DIM)
        self.slope = nn.Parameter(torch.tensor([0.5, 0.1]))
        self.score_mod, self.mask_mod, self.options = score_mod, mask_mod, options

    def functions(self, document: Tensor) -> tuple[Mod | None, Mod | None]:
        """Return the two functions of one place, with what they read beside it."""
        score = self.score_mod and (lambda s, b, h, i, j: self.score_mod(s, self.slope, b, h, i, j))
        mask = self.mask_mod and (lambda b, h, i, j: self.mask_mod(document, b, h, i, j))
        return score, mask

    def heads(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values of every head."""
        made = (self.query(x), *self.both(x).chunk(2, -1))
        return [each.unflatten(-1, (-1, DIM)).transpose(1, 2) for each in made]

    def forward(self, x: Tensor, document: Tensor) -> Any:
        score, mask = self.functions(document)
        blocks = None if mask is None else create_block_mask(mask, len(x), None, SEQ, SEQ, device="cpu")
        found = flex_attention(*self.heads(x), score_mod=score, block_mask=blocks, enable_gqa=True, **self.options)
        return (
            (found[0] * torch.arange(DIM) + found[1].unsqueeze(-1)).sum()
            if isinstance(found, tuple)
            else (found * torch.arange(DIM)).sum()
        )

    def by_places(self, x: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and logarithms of sums, one score after another."""
        query, key, value = self.heads(x)
        score, mask = self.functions(document)
        groups = HEADS // key.shape[1]
        found, sums = torch.zeros(BATCH, HEADS, SEQ, DIM), torch.full((BATCH, HEADS, SEQ), -math.inf)
        rows: list[Tensor] = []
        logs: list[Tensor] = []
        for b, h, i in torch.cartesian_prod(*(torch.arange(size) for size in (BATCH, HEADS, SEQ))):
            seen = [j for j in torch.arange(SEQ) if mask is None or bool(mask(b, h, i, j))]
            scores = [query[b, h, i] @ key[b, h // groups, j] / math.sqrt(DIM) for j in seen]
            scores = [s if score is None else score(s, b, h, i, j) for s, j in zip(scores, seen, strict=True)]
            rows.append(
                torch.stack(scores).softmax(0) @ torch.stack([value[b, h // groups, j] for j in seen])
                if seen
                else torch.zeros(DIM)
            )
            logs.append(torch.stack(scores).logsumexp(0) if seen else torch.tensor(-math.inf))
        return torch.stack(rows).view_as(found), torch.stack(logs).view_as(sums)


def alibi(score: Tensor, slope: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - slope[h] * (i - j).abs()


def causal(document: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def packed(document: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (document[b, i] == document[b, j])


def unseeing(document: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i != 2) & (document[b, i] == document[b, j])


@pytest.mark.parametrize(
    ("score", "mask", "heads_of_keys"),
    [(None, packed, 1), (None, unseeing, HEADS), (alibi, None, HEADS), (alibi, unseeing, 1)],
)
def test_values_and_gradients_are_those_of_every_place(score: Mod | None, mask: Mod | None, heads_of_keys: int):
    torch.manual_seed(0)
    model = Flexible(score, mask, heads_of_keys)
    x, document = torch.randn(BATCH, SEQ, 8), torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]])
    other = document.flip(0)

    found = run(capture(model, (x, document)), model, (x, other))
    wanted = (model.by_places(x, other)[0] * torch.arange(DIM)).sum()
    wanted.backward()

    torch.testing.assert_close(found.result, wanted)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found.gradients[name], parameter.grad)


def test_logarithms_of_sums_are_given_where_they_are_asked_for():
    torch.manual_seed(0)
    model = Flexible(None, causal, HEADS, return_lse=True)
    x, document = torch.randn(BATCH, SEQ, 8), torch.zeros(BATCH, SEQ, dtype=torch.int64)

    found = run(capture(model, (x, document)), model, (x, document))
    values, sums = model.by_places(x, document)
    wanted = (values * torch.arange(DIM) + sums.unsqueeze(-1)).sum()
    wanted.backward()

    torch.testing.assert_close(found.result, wanted)
    torch.testing.assert_close(found.gradients["query.weight"], model.query.weight.grad)


def test_a_causal_mask_is_the_kernels_own_argument():
    model = Flexible(None, causal, HEADS)
    example = (torch.randn(BATCH, SEQ, 8), torch.zeros(BATCH, SEQ, dtype=torch.int64))

    graph = capture(model, example).graph

    attention = [op for op in graph.ops if "flash_attention" in op.target]
    assert len(attention) == 2
    assert all(op.args[-1] is True and "attn_mask" not in dict(op.kwargs) for op in attention)


class Given(nn.Module):
    """Attention under a block mask that the caller makes."""

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        return flex_attention(x, x, x, block_mask=mask).sum()


def test_a_block_mask_as_input_is_refused_with_the_way_out():
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, SEQ, SEQ, device="cpu")

    with pytest.raises(UsageError, match="example input mask is of type BlockMask.*make it in forward"):
        capture(Given(), (torch.randn(BATCH, HEADS, SEQ, DIM), mask))
