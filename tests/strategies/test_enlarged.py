"""Whole values for a table's gradient are gathered before they are enlarged."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20000, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.table(rows).mean(1)).square().mean()


def test_the_gradient_of_a_mean_over_rows_travels_once_and_not_for_each_row() -> None:
    plan = autopar.plan(
        Bags(), "cpu:2", example_inputs=(torch.zeros(1024, 8, dtype=torch.int64),), fix={"dp_replicate": 2}
    )

    assert max(each.bytes for each in plan.decisions.collectives) == 1024 * 64 * 4
