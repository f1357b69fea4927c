"""What is told of a plan that was made for another program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import StalePlanError


class Layered(nn.Module):
    """Square layers and a head; `before` puts a parameter in front of all others."""

    def __init__(self, head: int, *, before: bool = False) -> None:
        super().__init__()
        if before:
            self.scale = nn.Parameter(torch.ones(8))
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale if hasattr(self, "scale") else x
        return self.head(torch.relu(self.body(x))).square().mean()


def test_sizes_are_compared_by_the_names_of_parameters_where_others_came_before_them():
    example = (torch.randn(4, 8),)
    plan = autopar.plan(Layered(head=3), "cpu:1", example_inputs=example, time_limit=5)

    with pytest.raises(StalePlanError) as caught:
        autopar.compile(Layered(head=5, before=True), "cpu:1", example_inputs=example, plan=plan)

    told = [line.strip() for line in str(caught.value).splitlines()[1:-1]]
    assert told == [
        "1 new parameters or buffers: scale",
        "head.weight: planned float32[3, 8], got float32[5, 8]",
        "head.bias: planned float32[3], got float32[5]",
    ]
