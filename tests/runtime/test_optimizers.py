"""Optimizers of torch and others on compiled models: the steps of one device, or an error before the first."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import autopar
from autopar.errors import UsageError
from tests.support.ranks import RankPool
from tests.support.training import whole

DATA = {"dp_replicate": 2}
ZERO = {"dp_shard": 2, "zero": 3}
TENSOR = {"tp": 2}
STAGES = {"pp": 2, "microbatch": 4}


class Blocks(nn.Module):
    """Four residual blocks and a distance."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16, bias=bias), nn.GELU(), nn.Linear(16, 8, bias=bias)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = x + layer(x)
        return (x - y).square().mean()


class Changed(optim.SGD):
    """SGD on gradients that it changes first."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.change([each for group in self.param_groups for each in group["params"] if each.grad is not None])
        super().step()
        return loss

    def change(self, graded: list[Any]) -> None:
        raise NotImplementedError


class ClipsByItself(Changed):
    def change(self, graded: list[Any]) -> None:
        norm = torch.stack([each.grad.norm() for each in graded]).norm()
        for each in graded:
            each.grad = each.grad / norm


class KeepsPlainTensors(Changed):
    """Keeps a running mean in a tensor that it makes itself, as Adafactor of transformers does."""

    def change(self, graded: list[Any]) -> None:
        for each in graded:
            torch.zeros(each.shape[:1]).to(each.grad).mul_(0.9).add_(each.grad.square().reshape(len(each), -1).mean(-1))


class LocalLargest(Changed):
    def change(self, graded: list[Any]) -> None:
        for each in graded:
            local = each.grad.to_local() if hasattr(each.grad, "to_local") else each.grad
            each.grad = each.grad / local.abs().max().item()


class Noisy(Changed):
    def change(self, graded: list[Any]) -> None:
        for each in graded:
            each.grad = each.grad + torch.randn(each.grad.shape, dtype=each.grad.dtype)


def _two_groups(model: nn.Module) -> optim.Optimizer:
    named = list(model.named_parameters())
    made = optim.AdamW([each for name, each in named if name.endswith("weight")], lr=1e-2)
    made.add_param_group({"params": [each for name, each in named if name.endswith("bias")], "lr": 3e-2})
    return made


def _of(kind: type[optim.Optimizer], **settings: Any) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda model: kind(model.parameters(), **settings)


MADE: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "adafactor": _of(optim.Adafactor, lr=1e-2),
    "adam fused": _of(optim.AdamW, lr=1e-2, fused=True),
    "clips by itself": _of(ClipsByItself, lr=1e-2),
    "groups": _two_groups,
    "lbfgs": _of(optim.LBFGS, lr=0.5, max_iter=4),
    "lbfgs searching": _of(optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe"),
    "local": _of(LocalLargest, lr=1e-2),
    "muon": _of(optim.Muon, lr=1e-2),
    "noisy": _of(Noisy, lr=1e-2),
    "plain": _of(KeepsPlainTensors, lr=1e-2),
    "rprop": _of(optim.Rprop, lr=1e-2),
    "sgd fused": _of(optim.SGD, lr=1e-2, fused=True),
}


class _Double:
    """torch, whose bfloat16 is of 64 bits."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float64" if name == "bfloat16" else name)


def _compute_muon_in_double() -> None:
    """Leave out Muon's rounding, which is no error of ours; up to torch 2.14 it casts by a method."""
    torch.Tensor.bfloat16 = torch.Tensor.double  # type: ignore[method-assign]
    vars(sys.modules["torch.optim._muon"])["torch"] = _Double()


def worst_error(_rank: int, name: str, fix: dict[str, Any], lazy: bool = False) -> float:
    """Return the largest relative error of a parameter after four steps at a rate that a schedule changes."""
    if name == "muon":
        _compute_muon_in_double()
    torch.manual_seed(0)
    reference = Blocks(bias=name != "muon")
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    example = None if lazy else (x, y)
    mine = autopar.compile(copy.deepcopy(reference), "cpu:2", example_inputs=example, fix=fix)
    for model in (reference, mine):
        optimizer = MADE[name](model)
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def closure(model: nn.Module = model, optimizer: optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x, y)
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
            schedule.step()
    wanted = dict(reference.named_parameters())
    return max(
        ((whole(each.detach()) - wanted[key]).norm() / wanted[key].norm()).item()
        for key, each in mine.named_parameters()
    )


@pytest.mark.parametrize("fix", [DATA, ZERO, TENSOR, STAGES], ids=str)
@pytest.mark.parametrize("name", ["adam fused", "groups", "muon", "rprop"])
def test_steps_are_those_of_one_device(pool: RankPool, name: str, fix: dict[str, Any]):
    for error in pool.values(worst_error, name, fix):
        assert error < 2e-5


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("lbfgs", DATA),
        ("lbfgs", ZERO),
        ("lbfgs searching", TENSOR),
        ("adafactor", STAGES),
        ("rprop", STAGES),
        ("sgd fused", STAGES),
    ],
    ids=str,
)
def test_what_some_plans_cannot_step_others_can(pool: RankPool, name: str, fix: dict[str, Any]):
    for error in pool.values(worst_error, name, fix):
        assert error < 2e-5


@pytest.mark.parametrize("lazy", [False, True], ids=["planned", "lazy"])
@pytest.mark.parametrize("name", ["lbfgs", "lbfgs searching", "clips by itself"])
def test_an_optimizer_that_joins_parameters_is_refused_with_stages(pool: RankPool, name: str, lazy: bool):
    for outcome in pool.run(worst_error, name, STAGES, lazy):
        assert outcome.kind == UsageError.__name__
        assert "updates each parameter by what it knows of the others" in outcome.error
        assert "--fix pp=1" in outcome.error


@pytest.mark.parametrize(("name", "fix"), [("adafactor", ZERO), ("adafactor", TENSOR), ("sgd fused", DATA)], ids=str)
def test_an_optimizer_that_fails_on_dtensors_is_refused_with_the_way_out(
    pool: RankPool, name: str, fix: dict[str, Any]
):
    for outcome in pool.run(worst_error, name, fix):
        assert outcome.kind == UsageError.__name__
        assert "fails on parameters that are DTensors" in outcome.error
        assert "use another optimizer" in outcome.error


def test_an_optimizer_that_fails_without_a_word_is_told_of_by_its_own_line(pool: RankPool):
    for outcome in pool.run(worst_error, "plain", ZERO):
        assert "AssertionError: it mixes plain tensors of its own with DTensors, most likely" in outcome.error
        assert "at runtime/test_optimizers.py:" in outcome.error
        assert "torch.zeros(each.shape[:1]).to(each.grad).mul_(0.9)" in outcome.error


def test_an_optimizer_that_works_on_a_ranks_part_is_refused(pool: RankPool):
    for outcome in pool.run(worst_error, "local", ZERO):
        assert "LocalLargest updates a parameter held as Shard(0) (such as layers.0.0." in outcome.error
        assert "works on this rank's part alone" in outcome.error


def test_an_optimizer_that_draws_noise_is_not_judged(pool: RankPool):
    for outcome in pool.run(worst_error, "noisy", STAGES):
        assert outcome.error == ""


def random_state_is_kept(_rank: int) -> bool:
    model = autopar.compile(Blocks(bias=True), "cpu:2", example_inputs=(torch.ones(8, 8), torch.ones(8, 8)), fix=DATA)
    model(torch.ones(8, 8), torch.zeros(8, 8)).backward()
    before = torch.get_rng_state()
    optim.AdamW(model.parameters()).step()
    return torch.equal(before, torch.get_rng_state())


def test_trying_an_optimizer_draws_no_random_numbers(pool: RankPool):
    assert all(pool.values(random_state_is_kept))


def made_before(_rank: int, fix: dict[str, Any]) -> str:
    """Step an optimizer of the parameters that a model had before it was compiled."""
    torch.manual_seed(0)
    model = Blocks(bias=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    mine = autopar.compile(model, "cpu:2", example_inputs=(x, y), fix=fix)
    before = [whole(each.detach()).clone() for each in mine.parameters()]
    mine(x, y).backward()
    try:
        optimizer.step()
    except UsageError as error:
        return str(error)
    after = [whole(each.detach()) for each in mine.parameters()]
    return f"changed {sum(not torch.equal(*pair) for pair in zip(before, after, strict=True))}"


@pytest.mark.parametrize("fix", [DATA, ZERO, TENSOR], ids=str)
def test_an_optimizer_made_before_compiling_is_refused_where_it_would_train_nothing(
    pool: RankPool, fix: dict[str, Any]
):
    for said in pool.values(made_before, fix):
        assert said.startswith(
            "16 of the 16 parameters of this SGD are not the model's any more (layers.0.0.weight is one): "
        )


def test_an_optimizer_made_before_compiling_trains_stages_that_keep_their_parameters(pool: RankPool):
    changed = [int(said.removeprefix("changed ")) for said in pool.values(made_before, STAGES)]

    assert sum(changed) == 16


def last_layers_alone(_rank: int) -> tuple[list[str], float]:
    """Return the warnings of compiling a model whose first layers are frozen, and how far it trains from one device."""
    torch.manual_seed(0)
    model = Blocks(bias=True).double()
    model.layers[:2].requires_grad_(False)
    batch = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        mine = autopar.compile(copy.deepcopy(model), "cpu:2", example_inputs=batch, fix=STAGES)
    for each in (model, mine):
        optimizer = optim.AdamW([{"params": [p for p in each.parameters() if p.requires_grad]}], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(*batch).backward()
            optimizer.step()
    wanted = dict(model.named_parameters())
    return [str(each.message) for each in told], max(
        (whole(p.detach()) - wanted[name].detach()).abs().max().item() for name, p in mine.named_parameters()
    )


def test_a_rank_whose_stages_train_nothing_is_told_what_its_optimizer_needs(pool: RankPool):
    first, second = pool.values(last_layers_alone)

    assert [each for each in first[0] if "AdamW([{" in each] == [
        each for each in first[0] if "of rank 0 have no" in each
    ]
    assert len([each for each in first[0] if "of rank 0 have no" in each]) == 1
    assert not [each for each in second[0] if "have no parameter" in each]
    assert max(first[1], second[1]) < 1e-9
