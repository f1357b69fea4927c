"""Degrees that a program admits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.api.admitted import splits_tensors
from tests.support.remembering import remembered


class Mixed(nn.Module):
    """A convolution of 3 x 3 windows, and a table of 6 columns that is larger or smaller than it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3)
        self.table = nn.Embedding(rows, 6)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean() + self.table(at).mean()


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1000, {2, 3, 4, 5, 6, 8, 10}), (100, {2, 4, 8, 16})], ids=["large table", "small table"]
)
def test_tensors_are_split_where_most_elements_are_of_matrices_that_divide(rows: int, sizes: set[int]):
    graph = remembered(Mixed(rows), (torch.empty(2, 8, 5, 5), torch.zeros(2, 3, dtype=torch.int64))).graph

    assert {size for size in range(2, 17) if splits_tensors(graph, size)} == sizes
