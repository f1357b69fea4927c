"""Whole values for a table's gradient are gathered before they are enlarged."""

from __future__ import annotations

import torch

import autopar
from tests.support.fused import Bags


def test_the_gradient_of_a_mean_over_rows_travels_once_and_not_for_each_row() -> None:
    rows = torch.zeros(1024, 8, dtype=torch.int64)
    plan = autopar.plan(Bags(), "cpu:2", example_inputs=(rows,), fix={"dp_replicate": 2})

    assert max(each.bytes for each in plan.decisions.collectives) == 1024 * 64 * 4
