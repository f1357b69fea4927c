"""Embedding bags of equal size, captured as look-ups and sums or maxima."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.capture import capture
from tests.support.whole import Whole


class Bags(nn.Module):
    def __init__(self, **how: object) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Parameter(torch.randn(12, 6))

    def forward(self, indices: Tensor, weights: Tensor | None = None) -> Tensor:
        return functional.embedding_bag(indices, self.table, per_sample_weights=weights, **self.how).square().mean()


HOW = [
    {"mode": "sum"},
    {"mode": "mean"},
    {"mode": "sum", "padding_idx": 3},
    {"mode": "mean", "padding_idx": -9},
    {"mode": "sum", "weighted": True},
    {"mode": "max"},
    {"mode": "max", "padding_idx": 3},
]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_opened_bags_are_the_kernels_in_value_and_gradient(how: dict[str, object]):
    torch.manual_seed(0)
    how = dict(how)
    indices = torch.randint(12, (8, 4))
    indices[0] = 3  # nothing but padding where 3 is that
    indices[1, 2] = 3
    example = (indices, torch.rand(8, 4)) if how.pop("weighted", False) else (indices,)
    model = Bags(**how)
    model.table.data[5] = model.table.data[7]  # of equal rows the first is the largest
    indices[2, :2] = torch.tensor([7, 5])
    whole = Whole.of(model, example)
    (tangent,) = (each for each in whole.captured.placeholders if each.kind == "tangent")
    whole.values[tangent.name] = torch.ones(())

    loss, gradient = whole.run()
    model(*example).backward()

    assert not [op for op in whole.captured.graph.ops if "embedding_bag" in op.target]
    torch.testing.assert_close(loss, model(*example).detach())
    torch.testing.assert_close(gradient, model.table.grad)


def test_bags_of_different_sizes_stay_as_they_are():
    captured = capture(Bags(offsets=torch.tensor([0, 3, 4])), (torch.randint(12, (9,)),))

    assert any("embedding_bag" in op.target for op in captured.graph.ops)
