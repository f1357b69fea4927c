"""Derivatives of compiled models that their programs do not compute: second ones, and those of torch.func."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import UsageError
from tests.support.ranks import RankPool
from tests.support.training import whole


class Chain(nn.Module):
    """A few layers; with a penalty of its own on the loss's gradient by the first of them."""

    def __init__(self, penalty: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.penalty = penalty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        loss = y.square().mean()
        if not self.penalty:
            return loss
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + self.penalty * slope.square().sum()


def _rows() -> torch.Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def penalised(_rank: int, fix: dict[str, Any]) -> None:
    """Penalise the norm of a gradient from outside of the model."""
    mine = autopar.compile(Chain().double(), "cpu:2", example_inputs=(_rows(),), fix=fix)
    loss = mine(_rows())
    (slope,) = torch.autograd.grad(loss, [next(mine.parameters())], create_graph=True)
    (loss + 0.1 * whole(slope).square().sum()).backward()


def first_alone(_rank: int, fix: dict[str, Any]) -> float:
    """Return how far gradients are from one device's, taken so that they could be differentiated again."""
    model = Chain().double()
    mine = autopar.compile(copy.deepcopy(model), "cpu:2", example_inputs=(_rows(),), fix=fix)
    for each in (model, mine):
        each(_rows()).backward(create_graph=True)
    wanted = {name: each.grad for name, each in model.named_parameters()}
    return max((whole(p.grad) - wanted[name]).abs().max().item() for name, p in mine.named_parameters())


PLANS = [{"tp": 2}, {"pp": 2, "microbatch": 4}]


@pytest.mark.parametrize("fix", PLANS, ids=str)
def test_a_gradient_that_is_differentiated_again_is_refused_with_the_way_out(pool: RankPool, fix: dict[str, Any]):
    for outcome in pool.run(penalised, fix):
        assert outcome.kind == "UsageError", outcome
        assert "a gradient of this compiled Chain is differentiated again" in outcome.error
        assert "inside of the model" in outcome.error


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("fix", PLANS, ids=str)
def test_gradients_that_could_be_differentiated_again_are_those_of_one_device(pool: RankPool, fix: dict[str, Any]):
    assert max(pool.values(first_alone, fix)) < 1e-12


def test_a_penalty_inside_of_the_model_is_that_of_one_device():
    torch.manual_seed(0)
    model, x = Chain(penalty=0.1).double(), _rows().requires_grad_()
    mine = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=(x,))
    for each in (model, mine):
        each(x).backward()

    wanted = dict(model.named_parameters())
    for name, each in mine.named_parameters():
        torch.testing.assert_close(each.grad, wanted[name].grad, rtol=1e-9, atol=1e-12)


def test_on_one_rank_it_is_refused_too():
    mine = autopar.compile(Chain(), "cpu:1", example_inputs=(_rows().float(),))
    (slope,) = torch.autograd.grad(mine(_rows().float()), [mine.layers[0].weight], create_graph=True)

    with pytest.raises(UsageError, match="differentiated again"):
        slope.square().sum().backward()


def transformed(_rank: int) -> None:
    """Take a gradient by torch.func."""
    mine = autopar.compile(Chain().double(), "cpu:2", example_inputs=(_rows(),), fix={"tp": 2})
    torch.func.grad(lambda x: mine(x))(_rows())


def test_a_transform_of_torch_func_is_refused_on_all_ranks(pool: RankPool):
    for outcome in pool.run(transformed, timeout_s=30):
        assert outcome.error.startswith("UsageError: this compiled Chain is called inside a transform of torch.func")
