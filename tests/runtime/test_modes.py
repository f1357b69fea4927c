"""Modes around a call of the compiled module: of its parts, and autocast."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputMismatchError
from tests.support.ranks import RankPool


class Noisy(nn.Module):
    """What does something else in evaluation, in a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.norm(x)).square().mean()


def test_a_part_put_into_evaluation_after_planning_is_named():
    x = torch.randn(8, 4)
    mine = autopar.compile(Noisy(), "cpu:1", example_inputs=(x,))
    mine(x)
    mine.norm.eval()

    with pytest.raises(InputMismatchError, match="module 'norm' is in evaluation mode now, and was in training mode"):
        mine(x)
    mine.eval()
    mine.drop.train()
    with pytest.raises(InputMismatchError, match="module 'drop' is in training mode now, and was in evaluation mode"):
        mine(x)


def test_a_part_frozen_before_planning_stays_so_and_evaluation_is_of_all():
    x, model = torch.randn(8, 4), Noisy()
    model.norm.eval()
    model.drop.eval()
    mine = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=(x,))

    torch.testing.assert_close(mine(x), model(x))
    model.eval()
    mine.eval()
    torch.testing.assert_close(mine(x), model(x))
    mine.train()
    with pytest.raises(InputMismatchError, match="module 'norm' is in training mode now"):
        mine(x)


def test_evaluation_of_many_shapes_is_told_of_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autopar.runtime.module._MANY_FORMS", 2)
    mine = autopar.compile(Noisy(), "cpu:1", example_inputs=(torch.randn(8, 4),)).eval()

    mine(torch.randn(2, 4))
    with pytest.warns(UserWarning, match="2 programs were made by now for calls in evaluation") as told:
        mine(torch.randn(3, 4))
    assert told[0].filename == __file__
    mine(torch.randn(2, 4))  # a known form makes no program, and warnings are errors here
    mine(torch.randn(5, 4))


def test_a_model_planned_at_its_first_call_goes_into_evaluation_as_a_whole():
    x, model = torch.randn(8, 4), Noisy()
    mine = autopar.compile(copy.deepcopy(model), "cpu:1")
    torch.manual_seed(3)
    wanted = model(x)
    torch.manual_seed(3)
    torch.testing.assert_close(mine(x), wanted)

    torch.testing.assert_close(mine.eval()(x), model.eval()(x))


class Layers(Noisy):
    """Nothing that depends on a mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def in_autocast(_rank: int, fix: dict[str, Any], precision: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the loss and the largest gradient's difference of a step inside autocast, backward included."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(8, 4)
    mine = autopar.compile(copy.deepcopy(model), "cpu:2", example_inputs=(x,), fix=fix, precision=precision)
    with torch.autocast("cpu", dtype=dtype):
        losses = [each(x) for each in (model, mine)]
        for loss in losses:
            loss.backward()
    held = dict(mine.named_parameters())
    wanted = {name: each.grad for name, each in model.named_parameters() if name in held and each.grad is not None}
    worst = max((_whole(held[name].grad) - grad).norm() / grad.norm() for name, grad in wanted.items())
    return (losses[1] - losses[0]).abs().item(), worst.item()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("fix", [{"dp_shard": 2}, {"pp": 2, "microbatch": 4}], ids=str)
def test_an_autocast_around_calls_is_that_of_the_plan(pool: RankPool, fix: dict[str, Any]):
    for loss, gradient in pool.values(in_autocast, fix, "bf16", torch.bfloat16):
        assert loss < 1e-2
        assert gradient < 3e-2


@pytest.mark.parametrize("fix", [{"dp_shard": 2}, {"pp": 2, "microbatch": 4}], ids=str)
@pytest.mark.parametrize(
    ("precision", "dtype", "text"),
    [
        ("fp32", torch.bfloat16, "planned without one.*precision='bf16'"),
        ("bf16", torch.float16, "planned for torch.bfloat16.*precision='fp16'"),
    ],
)
def test_another_autocast_is_refused_on_all_ranks(
    pool: RankPool, fix: dict[str, Any], precision: str, dtype: torch.dtype, text: str
):
    for outcome in pool.run(in_autocast, fix, precision, dtype):
        assert outcome.kind == "InputMismatchError"
        assert re.search(text, outcome.error)
