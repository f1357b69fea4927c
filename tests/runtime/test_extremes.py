"""Buffers that hold the largest or least of all samples, where micro-batches see some samples each."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError


class Observed(nn.Module):
    """A layer whose output's range is observed."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("least", torch.zeros(4))
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss; with `reads`, scaled by the range that this call's samples are part of."""
        found = self.layer(x)
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest * 0.9, found.abs().amax()))
            self.least.copy_(torch.minimum(found.amin(0), self.least))
        return (found / self.largest if self.reads else found).square().mean()


def test_ranges_are_those_of_all_samples():
    torch.manual_seed(0)
    model = Observed()
    alone = copy.deepcopy(model)
    batches = [torch.randn(8, 4) / (1 + step) for step in range(3)]
    compiled = autopar.compile(model, "cpu:1", example_inputs=(batches[0],), fix={"microbatch": 2})

    for batch in batches:
        compiled(batch).backward()
        alone(batch).backward()

    torch.testing.assert_close(dict(compiled.named_buffers()), dict(alone.named_buffers()), rtol=1e-6, atol=0)


def test_what_is_computed_with_this_steps_range_needs_all_samples():
    with pytest.raises(InfeasibleError, match=r"the batch cannot be cut into micro-batches: .*test_extremes\.py"):
        autopar.compile(Observed(reads=True), "cpu:1", example_inputs=(torch.randn(8, 4),), fix={"microbatch": 2})
