"""Projections fused for queries, keys and values, or gates: split within their parts, as experts split them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from tests.support.fused import Attention, Blocks, Gated, Merged

BATCH, SEQ, WIDTH = 32, 512, 512


@pytest.mark.parametrize("block", [Attention, Gated, Merged])
def test_activations_travel_as_residuals_alone(block: Callable[[int], nn.Module]) -> None:
    with torch.device("meta"):
        model, inputs = Blocks(block, WIDTH), (torch.empty(BATCH, SEQ, WIDTH),)
        plan = autopar.plan(model, "h100-sxm-80gb:4", example_inputs=inputs, fix={"tp": 4})

    residual = BATCH * SEQ * WIDTH * 4
    moved = [each for each in plan.decisions.collectives if each.op != "all_to_all"]
    # Of a weight: into the order of its parts, once a step.
    weights = [each for each in plan.decisions.collectives if each.op == "all_to_all"]
    assert max(each.bytes for each in moved) == residual
    assert sum(each.bytes * each.count for each in moved) < 12.5 * residual
    assert all(each.bytes <= 8 * WIDTH * WIDTH * 4 for each in weights)
