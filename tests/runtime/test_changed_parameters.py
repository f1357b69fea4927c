"""Parameters that forward itself changes, behind autograd's back: what ranks make of them, and which gradients."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError
from tests.support.ranks import RankPool
from tests.support.training import whole

FIXES: dict[str, dict[str, Any]] = {
    "dp": {"dp_replicate": 2},
    "zero": {"dp_shard": 2, "zero": 3},
    "zero, micro-batches": {"dp_shard": 2, "zero": 3, "microbatch": 4},
    "tp": {"tp": 2},
    "tp, recomputed": {"tp": 2, "recompute": "full"},
    "pp": {"pp": 2, "microbatch": 4},
}


class Clamped(nn.Module):
    """A block that clamps a weight while it is trained (Gemma 3n), or norms its rows: ways that autograd lets pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.up.out_features == 8:
            self.up.weight.data.clamp_(-0.2, 0.2)
        elif self.training:
            with torch.no_grad():
                self.up.weight.copy_(nn.functional.normalize(self.up.weight))
        return x + self.down(torch.tanh(self.up(x)))


class Clamping(nn.Module):
    """Some of them, whose widths two ranks split evenly and not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Clamped(width) for width in (8, 8, 7, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Looked(nn.Module):
    """A table whose rows that are read are first cut to a norm, each rank's samples reading others."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(12, 6, max_norm=1.0), nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids)).square().mean()


def worst_error(_rank: int, name: str, *, looked: bool = False) -> tuple[float, float]:
    """Return the largest relative error of a parameter after each of three steps' forward, and of a gradient."""
    torch.manual_seed(0)
    reference, x = (Clamping().double(), torch.randn(8, 6, dtype=torch.float64))
    if looked:
        reference, x = Looked().double(), torch.arange(16).view(8, 2) % 11
    mine = autopar.compile(copy.deepcopy(reference), "cpu:2", example_inputs=(x,), fix=FIXES[name])
    optimizers = [torch.optim.SGD(model.parameters(), lr=2.0) for model in (reference, mine)]
    values, gradients, wanted = 0.0, 0.0, dict(reference.named_parameters())
    for _ in range(3):
        for model, optimizer in zip((reference, mine), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).backward()
        for key, each in mine.named_parameters():
            values = max(values, _error(whole(each.detach()), wanted[key].detach()))
            gradients = max(gradients, _error(whole(each.grad), wanted[key].grad))
        for optimizer in optimizers:
            optimizer.step()
    return values, gradients


def _error(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", FIXES)
def test_changed_parameters_and_their_gradients_are_those_of_one_device(pool: RankPool, name: str):
    for values, gradients in pool.values(worst_error, name):
        assert values < 1e-12
        assert gradients < 1e-12


@pytest.mark.parametrize("name", ["dp", "zero", "tp"])
def test_rows_of_a_table_that_are_read_are_cut_on_all_ranks(pool: RankPool, name: str):
    for values, gradients in pool.values(partial(worst_error, looked=True), name):
        assert values < 1e-12
        assert gradients < 1e-12


def test_rows_that_all_samples_read_are_not_cut_in_micro_batches(pool: RankPool):
    with pytest.raises(AssertionError, match=r"embedding_renorm(.|\n)*taken to need all samples of a step"):
        pool.values(partial(worst_error, looked=True), "zero, micro-batches")


class Pulled(nn.Module):
    """A row of weights that is drawn towards the mean of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.center = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        self.center.data.lerp_(x.detach().exp().mean(0).sqrt(), 0.1)
        return (x - self.center).square().mean()


def test_a_new_value_that_comes_of_all_samples_is_not_made_in_micro_batches():
    with pytest.raises(InfeasibleError, match=r"aten\.sqrt.* needs all samples of a step at once"):
        autopar.plan(Pulled(), "cpu:2", example_inputs=(torch.randn(8, 6),), fix={"dp_replicate": 2, "microbatch": 2})
