"""Checkpoints by `torch.distributed.checkpoint` of models of which each rank holds some stages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import autopar
from autopar.errors import UsageError
from tests.support.ranks import RankPool

STAGES = {"pp": 2, "microbatch": 4}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model(nn.Module):
    """A table, layers and a head, each of which has a learning rate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _ids() -> torch.Tensor:
    return torch.randint(16, (8, 3), generator=torch.Generator().manual_seed(1))


def _made(fix: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = autopar.compile(Model(), "cpu:2", example_inputs=(_ids(),), fix=fix)
    parts = ("table", "layers", "head")
    groups = [[p for name, p in model.named_parameters() if name.startswith(part)] for part in parts]
    rates = zip(groups, (0.001, 0.01, 0.1), strict=True)
    return model, torch.optim.AdamW([{"params": group, "lr": rate} for group, rate in rates])


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(_ids())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resumed(_rank: int, folder: str, fix: dict[str, Any]) -> tuple[list[float], list[float], list[int]]:
    """Return the losses after a checkpoint, those of a new model that goes on from it, and the sizes of groups."""
    model, optimizer = _made(STAGES)
    _steps(model, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=FLAT), strict=True))
    dcp.save(state, checkpoint_id=folder)
    wanted = _steps(model, optimizer)
    model, other = _made(fix)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, other, options=FLAT), strict=True))
    dcp.load(state, checkpoint_id=folder)
    given = copy.copy(state["model"]), state["optimizer"]
    set_state_dict(model, other, model_state_dict=given[0], optim_state_dict=given[1], options=FLAT)
    return wanted, _steps(model, other), [len(group["params"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("fix", [STAGES, {"tp": 2}], ids=str)
def test_groups_that_a_stage_has_nothing_of_are_loaded(pool: RankPool, tmp_path: Path, fix: dict[str, Any]):
    found = pool.values(resumed, str(tmp_path), fix, timeout_s=60)
    assert [sizes[0] == 0 or sizes[2] == 0 for _, _, sizes in found] == [True, True]
    for wanted, got, _ in found:
        assert got == pytest.approx(wanted, rel=1e-6)


def in_lists(_rank: int) -> str:
    model, optimizer = _made(STAGES)
    with pytest.raises(UsageError) as refused:
        get_optimizer_state_dict(model, optimizer)
    return str(refused.value)


def test_a_state_whose_lists_one_rank_would_save_for_all_is_refused(pool: RankPool):
    for refused in pool.values(in_lists):
        assert "options=StateDictOptions(flatten_optimizer_state_dict=True)" in refused
