"""Parameters initialised after compiling: the numbers of one device on all ranks, or what to do instead."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.whole import whole
from tests.support.ranks import RankPool

FIXES = [{"dp_shard": 2}, {"tp": 2}, {"dp_replicate": 2}, {"pp": 2, "microbatch": 2}]


class Blocks(nn.Module):
    """An embedding, residual layers with a buffer, and a tied head; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.register_buffer("scale", torch.ones(1))
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def _compiled(model: nn.Module, fix: dict[str, Any]) -> nn.Module:
    ids = torch.randint(8, (4, 3), generator=torch.Generator().manual_seed(1))
    return autopar.compile(copy.deepcopy(model), "cpu:2", example_inputs=(ids,), fix=fix)


def initialise(module: nn.Module) -> None:
    """Do what initialisers do: draw, replace data, write rows, look at values, change buffers and attributes."""
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        if module.bias is not None:
            module.bias.data = torch.randn(module.bias.shape) * 0.1
            module.bias.scaled_by = 0.1
    if isinstance(module, nn.Embedding):
        module.weight.data.normal_(std=0.5)
        module.weight.data[2].zero_()
    if isinstance(module, nn.LayerNorm):
        module.weight.data *= 3
        module.bias.requires_grad_(False)
    if isinstance(module, Blocks):
        module.scale.fill_(0.25)


def applied(rank: int, fix: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    """Return one device's and the compiled model's state, and whether parameters are the same objects as before."""
    torch.manual_seed(0)
    model = Blocks()
    mine = _compiled(model, fix)
    before = list(mine.parameters())
    torch.manual_seed(7)
    model.apply(initialise)
    torch.manual_seed(7 + rank)  # rank 0's counts
    assert mine.apply(initialise) is mine
    same = all(one is other for one, other in zip(before, mine.parameters(), strict=True))
    for name, each in mine.named_parameters():
        assert each.requires_grad is (name != "norm.bias")
        assert hasattr(each, "scaled_by") is (name.startswith("layers") and name.endswith("bias"))
    return dict(model.state_dict()), autopar.full_state_dict(mine), same


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_apply_gives_every_module_its_whole_tensors_on_all_ranks(pool: RankPool, fix: dict[str, Any]):
    values = pool.values(applied, fix)
    wanted, got, _ = values[0]
    assert all(same for *_, same in values)
    for name, each in wanted.items():
        assert torch.equal(got[name], each), name


def drawn(_rank: int, fix: dict[str, Any]) -> list[torch.Tensor]:
    """Return what one device draws and what ranks draw, by initialisers of torch on parameters and as noise."""
    torch.manual_seed(0)
    model = Blocks()
    mine = _compiled(model, fix)
    found = []
    for each in (model, mine):
        torch.manual_seed(3)
        with torch.no_grad():
            nn.init.kaiming_uniform_(each.layers[0].weight)
            each.layers[1].weight.bernoulli_(0.5)
            each.table.weight.add_(torch.randn_like(each.table.weight))
            each.layers[2].weight.data.exponential_(generator=torch.Generator().manual_seed(9))
            nn.init.uniform_(each.layers[3].bias)
        found.append(torch.cat([whole(p).flatten() for p in each.parameters()]).detach())
    return found


@pytest.mark.parametrize("fix", FIXES[:3], ids=str)
def test_random_operators_on_parameters_draw_what_one_device_draws(pool: RankPool, fix: dict[str, Any]):
    for wanted, got in pool.values(drawn, fix):
        assert torch.equal(got, wanted)


def reshaped(_rank: int, fix: dict[str, Any]) -> None:
    def change(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.weight = nn.Parameter(torch.ones(7))

    _compiled(Blocks(), fix).apply(change)


@pytest.mark.parametrize("fix", FIXES[1::2], ids=str)
def test_apply_of_what_changes_a_shape_is_refused_on_all_ranks(pool: RankPool, fix: dict[str, Any]):
    for outcome in pool.run(reshaped, fix):
        assert "changes norm.weight from [6] to [7]" in outcome.error


def elsewhere(rank: int, how: str) -> None:
    mine = _compiled(Blocks(), FIXES[3])
    layer = mine.layers[3 if rank == 0 else 0]
    assert layer._parameters["weight"] is None
    assert layer.weight.shape == (6, 6)
    copy.deepcopy(mine)
    if how == "init":
        nn.init.normal_(layer.weight)
    if how == "zero":
        layer.bias.data.zero_()
    if how == "read":
        print(layer.weight.sum())


@pytest.mark.parametrize("how", ["init", "zero", "read"])
def test_a_parameter_of_another_stage_says_where_it_is_and_what_to_do(pool: RankPool, how: str):
    for rank, outcome in enumerate(pool.run(elsewhere, how)):
        name = f"layers.{3 if rank == 0 else 0}.{'bias' if how == 'zero' else 'weight'}"
        assert f"{name} is of a pipeline stage that this rank does not have (it is on rank {1 - rank})" in outcome.error
        assert "model.apply(function) on all ranks" in outcome.error
