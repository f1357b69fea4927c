"""Loops over parameters by hand, where each rank holds some pipeline stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import UsageError
from tests.runtime.test_clipping import backward
from tests.support.ranks import RankPool
from tests.support.training import whole


def sums(_rank: int, fix: dict[str, Any]) -> list[tuple[float, float]]:
    """Return sums over the parameters of one device's model, and those of the compiled one."""
    reference, mine = backward(4, fix)
    for each in (reference, mine):
        for name, p in each.named_parameters():
            if name == "layers.3.0.bias":
                p.grad.fill_(torch.nan)

    def of_table(name: str, p: nn.Parameter) -> torch.Tensor | None:
        return whole(p.grad).square().sum() if name.startswith("table") else None

    functions: list[Callable[[str, nn.Parameter], Any]] = [
        lambda name, p: p.grad.norm() ** 2 if name != "layers.3.0.bias" else None,
        lambda _, p: (~p.grad.isfinite()).sum(),
        lambda _, p: p.numel(),
        of_table,
    ]
    return [tuple(autopar.sum_over_parameters(each, do).item() for each in (reference, mine)) for do in functions]


@pytest.mark.parametrize("fix", [{"pp": 2, "tp": 2, "microbatch": 4}, {"tp": 4}], ids=str)
def test_sums_over_parameters_are_those_of_one_device_on_every_rank(four: RankPool, fix: dict[str, Any]):
    for found in four.values(sums, fix):
        assert [want for want, _ in found][1] == 8
        for want, got in found:
            assert got == pytest.approx(want, rel=1e-5)


def test_a_term_of_several_numbers_is_refused():
    with pytest.raises(UsageError, match=r"gave \[4\] numbers for bias, .* p.grad.square\(\).sum\(\)"):
        autopar.sum_over_parameters(nn.Linear(2, 4), lambda name, p: p if name == "bias" else None)


def by_methods(model: nn.Module) -> None:
    total = 0.0
    for p in model.parameters():
        total += p.grad.data.norm(2).item() ** 2


def by_functions(model: nn.Module) -> None:
    [torch.isnan(p.grad).any() for name, p in model.named_parameters() if "layers" in name]


def by_generator(model: nn.Module) -> None:
    sum(p.grad.square().sum() for p in model.parameters())


def decay_and_average(model: nn.Module) -> None:
    """Do to each parameter what depends on no other."""
    mean = [p.detach().clone() for p in model.parameters()]
    for (name, p), other in zip(model.named_parameters(), mean, strict=True):
        if not any(each in name for each in ("bias", "norm")):
            p.grad.add_(p.data, alpha=0.1)
        other.mul_(0.9).add_(p.data, alpha=0.1)
    torch.optim.AdamW(model.parameters())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    print(sum(each.square().sum() for each in mean).item())


def told(_rank: int, loop: Callable[[nn.Module], None]) -> list[str]:
    _, mine = backward(2, {"pp": 2, "microbatch": 4})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loop(mine)
    return [f"{each.filename} {each.lineno} {each.message}" for each in caught]


@pytest.mark.parametrize("loop", [by_methods, by_functions, by_generator])
def test_a_loop_that_adds_up_over_a_ranks_own_stages_is_told_of_once(pool: RankPool, loop: Callable[..., None]):
    line = loop.__code__.co_firstlineno + (2 if loop is by_methods else 1)
    for found in pool.values(told, loop):
        assert len(found) == 1
        assert found[0].startswith(f"{__file__} {line} this loop over the parameters of Tied makes numbers of each")
        assert "autopar.sum_over_parameters(model, function)" in found[0]


def test_loops_that_treat_each_parameter_alike_are_not_told_of(pool: RankPool):
    assert pool.values(told, decay_and_average) == [[], []]
