"""Degrees that a program admits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.api.admitted import looks_up_most, splits_tensors
from autopar.ir.placement import Shard
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


class Clicks(nn.Module):
    """Tables, one of them averaged over bags, and a layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 128) for _ in range(3))
        self.bags = nn.EmbeddingBag(rows, 128)
        self.layer = nn.Linear(512, 256)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        found = [table(at[:, i]) for i, table in enumerate(self.tables)]
        return self.layer(torch.cat([*found, self.bags(at)], 1)).square().mean()


@pytest.mark.parametrize(("rows", "most"), [(1000, True), (100, False)])
def test_most_is_looked_up_where_tables_outweigh_the_rest(rows: int, most: bool):
    model, inputs = Clicks(rows), (torch.zeros(64, 3, dtype=torch.int64),)

    assert looks_up_most(remembered(model, inputs).graph) is most


def test_a_tied_table_is_no_table():
    model = nn.Sequential()
    model.forward = lambda at: (model.table(at) @ model.table.weight.T).square().mean()  # type: ignore[method-assign]
    model.table = nn.Embedding(1000, 128)
    assert not looks_up_most(remembered(model, (torch.zeros(64, dtype=torch.int64),)).graph)


def test_tables_are_split_over_more_devices_than_matrices_are():
    inputs = (torch.zeros(65536, 3, dtype=torch.int64),)
    fix = {"pp": 1, "microbatch": 65536, "recompute": "none"}
    plan = autopar.plan(Clicks(100_000), "dgx-a100-80gbx8", example_inputs=inputs, fix=fix, time_limit=10)

    assert [axis.size for axis in plan.decisions.mesh.axes] == [64]
    tables = [each for name, each in plan.decisions.parameters.items() if "tables" in name or "bags" in name]
    assert len(tables) == 4
    for table in tables:
        assert table.placements == (Shard(1),)
        assert table.gather == "none"
