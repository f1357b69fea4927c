"""Fused projections split within their parts, and values gathered before they are enlarged, on two real ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.support.fused import Attention, Bags, Blocks, Gated, Merged
from tests.support.ranks import RankPool
from tests.support.training import same_step


def train(_rank: int, make: Callable[[], nn.Module], inputs: Tensor, fix: dict[str, int]) -> None:
    """Check the loss and the gradients of a step."""
    torch.manual_seed(0)
    model = make().double()
    compiled = autopar.compile(copy.deepcopy(model), "cpu:2", example_inputs=(inputs,), fix=fix)
    same_step(compiled, model, (inputs,))


def attention() -> nn.Module:
    return Blocks(Attention, 32)


def gated() -> nn.Module:
    return Blocks(Gated, 32)


def merged() -> nn.Module:
    return Blocks(Merged, 32)


@pytest.mark.parametrize("make", [attention, gated, merged])
def test_fused_projections_split_by_tensor_parallelism(pool: RankPool, make: Callable[[], nn.Module]) -> None:
    pool.values(train, make, torch.randn(16, 64, 32, dtype=torch.float64), {"tp": 2})


def test_a_table_whose_rows_share_a_gradient(pool: RankPool) -> None:
    pool.values(train, Bags, torch.randint(0, 20000, (64, 8)), {"dp_replicate": 2})
