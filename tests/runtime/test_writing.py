"""Writes into views of tensors that a plan splits, and at places of them, in loops that change weights or gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.support.ranks import RankPool

SPLITS = [{"dp_shard": 2}, {"tp": 2}]
ROWS = torch.tensor([4, 1])
ONES = torch.ones(2, 4)

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "w[3] = number": lambda w: w.__setitem__(3, 0.5),
    "w[3] = row": lambda w: w.__setitem__(3, torch.arange(4.0)),
    "w[:, 1] = number": lambda w: w.__setitem__((slice(None), 1), 0.5),
    "w[:4].zero_()": lambda w: w[:4].zero_(),
    "w[:4] *= 2": lambda w: w.__setitem__(slice(4), w[:4].mul_(2)),
    "w[1:5][2, :3] = number": lambda w: w[1:5][2, :3].fill_(0.5),
    "w[:, 1:].T[0] += w[:, 0]": lambda w: w[:, 1:].T[0].add_(w[:, 0]),
    "w.data[2:].copy_": lambda w: w.data[2:].copy_(torch.ones(4, 4)),
    "w.chunk(3)[1]": lambda w: w.chunk(3)[1].mul_(3),
    "w.split(3, 1)[1]": lambda w: w.split(3, 1)[1].mul_(3),
    "w.unsqueeze(0).flatten()[5:9]": lambda w: w.unsqueeze(0).view(-1)[5:9].zero_(),
    "w.diagonal()": lambda w: w.diagonal().fill_(1),
    "nn.init.normal_(w[:3])": lambda w: (torch.manual_seed(3), nn.init.normal_(w[:3])),
    "w[rows] = number": lambda w: w.__setitem__(ROWS, 0.5),
    "w[mask] = number": lambda w: w.__setitem__(torch.arange(6) % 3 == 1, 0.5),
    "w[rows, columns] = numbers": lambda w: w.__setitem__((ROWS, ROWS % 3), torch.tensor([7.0, 8.0])),
    "index_copy_": lambda w: w.index_copy_(0, ROWS, ONES),
    "index_add_": lambda w: w.index_add_(0, ROWS, w[:2].clone()),
    "index_fill_": lambda w: w.index_fill_(0, ROWS, 0.0),
    "scatter_": lambda w: w.scatter_(1, ROWS[:, None] % 4, 7.0),
    "scatter_add_": lambda w: w.scatter_add_(0, torch.tensor([[5, 2, 0, 1]]), ONES),
}


def written(_rank: int, fix: dict[str, Any]) -> dict[str, float]:
    """Return by write how far weights and gradients are from one device's after it, of six and of four rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    x = torch.randn(8, 4)
    mine = autopar.compile(copy.deepcopy(model), "cpu:2", example_inputs=(x,), fix=fix)
    for each in (model, mine):
        each(x).square().sum().backward()
    apart = {}
    for name, write in WRITES.items():
        for kind in ("data", "grad"):
            both = [getattr(each[0].weight, kind) for each in (model, mine)]
            with torch.no_grad():
                for each in both:
                    write(each)
            apart[f"{name} of {kind}"] = (both[1].full_tensor() - both[0]).abs().max().item()
    return apart


@pytest.mark.parametrize("fix", SPLITS, ids=str)
def test_writes_into_views_and_at_places_are_those_of_one_device(pool: RankPool, fix: dict[str, Any]):
    for apart in pool.values(written, fix):
        assert {name: each for name, each in apart.items() if each > 1e-5} == {}


def read(_rank: int, fix: dict[str, Any]) -> tuple[float, float]:
    """Return how far a penalty on rows of a weight, which is read only, and its gradient are from one device's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    x = torch.randn(8, 4)
    mine = autopar.compile(copy.deepcopy(model), "cpu:2", example_inputs=(x,), fix=fix)
    penalties = [each[0].weight[1:4].T[0].square().sum() for each in (model, mine)]
    for each in penalties:
        each.backward()
    values = [getattr(each, "full_tensor", lambda each=each: each)() for each in penalties]
    gradients = model[0].weight.grad, mine[0].weight.grad.full_tensor()
    return (values[1] - values[0]).abs().item(), (gradients[1] - gradients[0]).abs().max().item()


@pytest.mark.parametrize("fix", SPLITS, ids=str)
def test_views_that_are_read_have_values_and_gradients_of_one_device(pool: RankPool, fix: dict[str, Any]):
    for value, gradient in pool.values(read, fix):
        assert max(value, gradient) < 1e-5
