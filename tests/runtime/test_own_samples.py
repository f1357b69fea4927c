"""Data-parallel ranks that sort, count and point at their own samples: numbers as on one device, nothing travels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.support.ranks import RankPool
from tests.support.routing import Experts, Ranked, routing
from tests.support.training import same_step


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def _of(name: str) -> tuple[nn.Module, Any]:
    if name in routing():
        return routing()[name]
    torch.manual_seed(0)
    return Ranked(name), (torch.randn(8, 4),)


def train(_rank: int, name: str, fix: dict[str, int]) -> None:
    """Check loss and gradients of a step in float64."""
    model, inputs = _of(name)
    inputs = tuple(each.double() if each.is_floating_point() else each for each in inputs)
    model = model.double()
    compiled = autopar.compile(copy.deepcopy(model), "cpu:4", example_inputs=inputs, fix=fix)
    same_step(compiled, model, inputs)


DATA: list[dict[str, int]] = [
    {"dp_replicate": 4},
    {"dp_shard": 4, "zero": 3},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "dp_shard": 2, "microbatch": 1},
]


@pytest.mark.parametrize("fix", DATA, ids=str)
@pytest.mark.parametrize("name", ["experts", "near", "picked", "pairs"])
def test_ranks_do_on_their_own_samples_what_one_device_does(pool: RankPool, name: str, fix: dict[str, int]) -> None:
    pool.values(train, name, fix)


LEFT = {"experts": 64, "near": 64, "pairs": 80, "picked": 320}
"""Bytes of losses, of pairs' gradient that halves give, and of what all samples share, split for its gradient."""


@pytest.mark.parametrize("name", LEFT)
def test_nothing_travels_but_gradients(name: str) -> None:
    model, inputs = _of(name)
    assert sent_beside_gradients(model, inputs, 4, {"dp_replicate": 4}) <= LEFT[name]


def sent_beside_gradients(model: nn.Module, inputs: Any, ranks: int, fix: dict[str, int]) -> int:
    """Return the bytes that a data-parallel plan sends but those of the parameters' gradients: of the loss, say."""
    plan = autopar.plan(model, f"cpu:{ranks}", example_inputs=inputs, fix=fix)
    assert plan.decisions.mesh.names == ("dp_replicate",)
    gradients = sum(each.numel() * each.element_size() for each in model.parameters())
    return plan.estimates.communication_bytes - gradients


BESIDE = [(name, fix) for name in ("experts", "near", "picked") for fix in ({"dp_shard": 2, "tp": 2}, {})]


@pytest.mark.parametrize(("name", "fix"), [*BESIDE, ("experts", {"dp_replicate": 2, "ep": 2})], ids=str)
def test_beside_axes_that_split_something_else(pool: RankPool, name: str, fix: dict[str, int]) -> None:
    pool.values(train, name, fix)


MIXING = ["neighbours", "beside", "numbers", "positions", "table", "halves", "swapped", "diagonal", "first"]


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_meet_others_are_those_of_the_whole_batch(pool: RankPool, name: str) -> None:
    pool.values(train, name, {"dp_replicate": 4})


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_free_axis_does_so_where_the_batch_is_large(ranks: int) -> None:
    assert sent_beside_gradients(Experts(), (torch.randn(256, 128, 8),), ranks, {}) <= 64


def test_a_batch_that_does_not_divide_is_sorted_as_a_whole() -> None:
    plan = autopar.plan(Experts(), "cpu:4", example_inputs=(torch.randn(6, 128, 8),), fix={"tp": 4})
    assert "own" not in str(plan.decisions)
