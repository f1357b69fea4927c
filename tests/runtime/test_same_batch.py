"""Ranks that bring different batches to a call are told so, in its argument's name, before numbers are wrong."""

from __future__ import annotations

import math
import re
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime import same_batch
from autopar.runtime.same_batch import difference, seen
from tests.support.ranks import RankPool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def called(rank: int, fix: dict[str, Any], how: str) -> tuple[int, str]:
    """Return in which call ranks were told apart, and in what words; 0 where they were not."""
    mine = autopar.compile(Net(), "cpu:2", example_inputs=_batch(0), fix=fix)
    for step in range(1, 9):
        apart = rank if how == "at once" or (how == "later" and step > 4) else 0
        x, y = _batch(step + 100 * apart)
        if how == "rounding":
            x = x * (1 + 1e-3 * rank)
        try:
            mine(x, y).backward()
        except autopar.RanksDisagreeError as error:
            return step, str(error)
    return 0, ""


@pytest.mark.parametrize("fix", [{"dp_replicate": 2}, {"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize(("how", "found_at"), [("at once", 1), ("later", 8), ("rounding", 0)])
def test_other_batches_are_found_and_rounding_is_none(pool: RankPool, fix: dict[str, Any], how: str, found_at: int):
    for step, text in pool.values(called, fix, how):
        assert step == found_at
        assert not step or text.startswith("rank 1 brings another batch: rank 1 has other values of argument x\nevery")


def own_lengths(rank: int) -> None:
    x, y = _batch(0)
    mine = autopar.compile(Net(), "cpu:2", example_inputs=(x, y), fix={"dp_replicate": 2})
    mine(x[: 8 - rank], y[: 8 - rank])


def own_parts(rank: int, rows: int) -> float:
    x, y = _batch(0)
    mine = autopar.compile(Net(), "cpu:2", example_inputs=(x, y), fix={"dp_replicate": 2}, inputs="local")
    rows = rows if rank else 4
    return float(mine(x[4 * rank :][:rows], y[4 * rank :][:rows]))


def test_ranks_that_bring_other_shapes_are_told_which(pool: RankPool):
    for outcome in pool.run(own_lengths):
        assert outcome.kind == "RanksDisagreeError"
        assert "rank 1 has argument x as float32[7, 4] and not float32[8, 4]" in outcome.error
        assert "inputs='local'" in outcome.error


def test_parts_of_the_batch_have_one_shape_and_their_own_values(pool: RankPool):
    first, second = pool.values(own_parts, 4)
    assert first == second

    for outcome in pool.run(own_parts, 3):
        assert "rank 1 has argument x as float32[3, 4] and not float32[4, 4]" in outcome.error
        assert "drop_last=True" in outcome.error


X = torch.arange(6.0)


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({"x": X}, {"x": X.clone()}, ""),
        ({"x": X}, {"x": X.roll(1)}, "other values of argument x"),
        ({"x": X.int()}, {"x": X.int() + 1}, "other values of argument x"),
        ({"x": X > 2}, {"x": X > 3}, "other values of argument x"),
        ({"x": torch.full((3,), math.nan)}, {"x": torch.full((3,), math.nan)}, ""),
        ({"x": X.to("meta")}, {"x": X.to("meta")}, ""),
        ({"x": {"ids": X}}, {"x": {"ids": -X}}, "other values of argument x.ids"),
        ({"x": X, "flag": True}, {"x": X, "flag": False}, "argument flag as False and not True"),
        ({"x": X, "beta": 0.1}, {"x": X, "beta": 0.1000001}, ""),
        ({"x": X, "cache": object()}, {"x": X, "cache": object()}, ""),
        ({"x": X}, {"x": X, "mask": X}, "arguments x, mask and not x"),
        ({"x": torch.zeros(0)}, {"x": torch.zeros(0)}, ""),
    ],
)
def test_what_tells_two_calls_apart(one: dict[str, Any], other: dict[str, Any], text: str):
    assert difference(seen({}, one, numbers=True), seen({}, other, numbers=True)) == text


def test_large_tensors_are_compared_in_some_places():
    ((_, _, numbers),) = seen({"x": torch.zeros(1000, 1000)}, {}, numbers=True)

    assert numbers is not None
    assert 512 <= numbers.numel() <= 1024


def waiting(rank: int) -> list[str]:
    """Return the warnings of a third call of a new form, to which the second rank comes late."""
    mine = autopar.compile(Net(), "cpu:2", example_inputs=_batch(0), fix={"tp": 2})
    for step in range(2):
        mine(*_batch(step))
    x, y = _batch(2)
    with warnings.catch_warnings(record=True) as told, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(same_batch, "_PATIENCE_S", 0.1)
        time.sleep(rank)
        mine(x[:4], y[:4])
    return [str(each.message) for each in told]


def test_a_rank_that_waits_with_a_form_of_its_own_says_which(pool: RankPool):
    first, second = pool.values(waiting)

    text = r"rank 0 has waited 0 s for the other ranks with a form .* \(x float32\[4, 4\], y float32\[4, 4\]\)"
    assert len([each for each in first if re.match(text, each)]) == 1
    assert not [each for each in second if "has waited" in each]
