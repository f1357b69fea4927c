"""Ranks that bring their own part of the batch get the global batch's losses, gradients and outputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import UsageError
from tests.support.ranks import RankPool


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> object:
        logits = self.two(torch.relu(self.one(x)))
        return logits if y is None else nn.functional.cross_entropy(logits, y)


def made() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Classifier(), torch.randn(8, 8), torch.randint(6, (8,))


def train_and_evaluate(rank: int, fix: dict[str, int]) -> tuple[int, int]:
    model, x, y = made()
    mine = autopar.compile(copy.deepcopy(model), "cpu:2", example_inputs=(x, y), inputs="local", fix=fix)
    index, count = autopar.input_part(mine)
    part = slice(index * 8 // count, (index + 1) * 8 // count)
    want, got = model(x, y), mine(x[part], y[part])
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want)
    for a, b in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad)
    mine.eval()
    with torch.no_grad():
        logits = mine(x[part])
        other = mine(x[:4][part.start // 2 : part.stop // 2])
    torch.testing.assert_close(logits.full_tensor() if hasattr(logits, "full_tensor") else logits, model(x))
    torch.testing.assert_close(other.full_tensor() if hasattr(other, "full_tensor") else other, model(x[:4]))
    return index, count


@pytest.mark.parametrize(
    ("fix", "parts"),
    [({"dp_shard": 2}, [(0, 2), (1, 2)]), ({"dp_replicate": 2}, [(0, 2), (1, 2)]), ({"tp": 2}, [(0, 1), (0, 1)])],
    ids=["sharded", "replicated", "tensor parallel"],
)
def test_a_part_of_the_batch_is_enough(pool: RankPool, fix: dict[str, int], parts: list[tuple[int, int]]):
    assert pool.values(train_and_evaluate, fix) == parts


def test_the_global_batch_must_be_known():
    model, x, y = made()

    with pytest.raises(UsageError, match=r'^inputs="local" needs example_inputs, the global batch'):
        autopar.compile(model, "cpu:1", inputs="local")
    with pytest.raises(UsageError, match=r"^inputs='locl' is unknown \(did you mean 'local'\?\)"):
        autopar.compile(model, "cpu:1", example_inputs=(x, y), inputs="locl")
    with pytest.raises(UsageError, match=r"^Classifier is no compiled model, or has no plan yet"):
        autopar.input_part(model)


def test_alone_a_rank_brings_the_whole():
    model, x, y = made()

    assert autopar.input_part(autopar.compile(model, "cpu:1", example_inputs=(x, y), inputs="local")) == (0, 1)
