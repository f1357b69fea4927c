"""States as a single device has them: gathered from all ranks, and given to an optimizer on ranks."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import UsageError
from tests.support.ranks import RankPool

SPLITS = [({"dp_shard": 2}, 6), ({"dp_shard": 2}, 5), ({"tp": 2}, 6)]
"""With the width of the model; ranks hold parts of unlike sizes of one that they do not divide."""

STAGES = ({"pp": 2, "microbatch": 2}, 6)


class Tied(nn.Module):
    """A table that is read first and last, a frozen buffer, and layers between; returns the loss."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(8, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.register_buffer("scale", torch.tensor([0.5]))
        self.register_buffer("passing", torch.ones(1), persistent=False)
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale * self.passing
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _ids() -> torch.Tensor:
    return torch.randint(8, (4, 3), generator=torch.Generator().manual_seed(1))


def _compiled(model: nn.Module, fix: dict[str, Any]) -> nn.Module:
    return autopar.compile(copy.deepcopy(model), "cpu:2", example_inputs=(_ids(),), fix=fix)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(_ids()).backward()
    optimizer.step()
    optimizer.zero_grad()


def gathered(_rank: int, fix: dict[str, Any], width: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the single-device model's state after a step, and what the compiled one's state is gathered to."""
    torch.manual_seed(0)
    model = Tied(width)
    mine = _compiled(model, fix)
    for each in (model, mine):
        _step(each, torch.optim.SGD(each.parameters(), lr=0.5))
    return dict(model.state_dict()), autopar.full_state_dict(mine)


@pytest.mark.parametrize(("fix", "width"), [*SPLITS, STAGES], ids=str)
def test_the_full_state_is_the_single_devices_in_its_order_on_rank_0(pool: RankPool, fix: dict[str, Any], width: int):
    (wanted, got), (_, elsewhere) = pool.values(gathered, fix, width)

    assert list(got) == list(wanted)
    for name, each in wanted.items():
        torch.testing.assert_close(got[name], each, msg=lambda text, name=name: f"{name}: {text}")
    assert elsewhere == {}


def resumed(_rank: int, fix: dict[str, Any], width: int, after_a_step: bool) -> float:
    """Return how far training is from one device's that goes on from one device's state of model and optimizer."""
    torch.manual_seed(0)
    model = Tied(width)
    mine = _compiled(model, fix)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, mine)]
    if after_a_step:
        _step(mine, optimizers[1])
    for _ in range(2):
        _step(model, optimizers[0])
    mine.load_state_dict(model.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for each, optimizer in zip((model, mine), optimizers, strict=True):
        _step(each, optimizer)
    wanted = dict(model.named_parameters())
    return max(
        (each.full_tensor() - wanted[name]).abs().max().item()
        for name, each in ((name, each.detach()) for name, each in mine.named_parameters())
    )


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize(("fix", "width"), SPLITS, ids=str)
def test_an_optimizer_goes_on_from_a_single_devices_state(
    pool: RankPool, fix: dict[str, Any], width: int, after_a_step: bool
):
    assert max(pool.values(resumed, fix, width, after_a_step)) < 1e-5


def _optimizer(model: nn.Module, groups: str) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    if groups == "factored":
        return torch.optim.Adafactor(named.values(), lr=0.1)
    if groups == "one":
        return torch.optim.AdamW(named.values(), lr=0.1)
    flat = [(name, each) for name, each in named.items() if each.dim() == 1]
    rest = [(name, each) for name, each in named.items() if each.dim() > 1]
    if groups == "two":
        flat, rest = [[each for _, each in group] for group in (flat, rest)]
    return torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": rest, "lr": 0.05}], lr=0.1)


def given_and_returned(_rank: int, fix: dict[str, Any], width: int, groups: str) -> tuple[float, float]:
    """Return how far a compiled model is from one device that it goes on from, and then one device from it."""
    torch.manual_seed(0)
    model = Tied(width)
    mine = _compiled(model, fix)
    optimizers = [_optimizer(each, groups) for each in (model, mine)]
    for _ in range(2):
        _step(model, optimizers[0])
    mine.load_state_dict(model.state_dict())
    autopar.load_optimizer_state_dict(mine, optimizers[1], copy.deepcopy(optimizers[0].state_dict()))
    there = _apart(model, mine, optimizers)
    state = autopar.full_optimizer_state_dict(mine, optimizers[1])
    if _rank == 0:
        wanted = optimizers[0].state_dict()
        assert [each["params"] for each in state["param_groups"]] == [e["params"] for e in wanted["param_groups"]]
        assert state["state"].keys() == wanted["state"].keys()
        assert not any(hasattr(value, "full_tensor") for each in state["state"].values() for value in each.values())
        optimizers[0] = _optimizer(model, groups)
        optimizers[0].load_state_dict(state)
    return there, _apart(model, mine, optimizers)


def _apart(model: nn.Module, mine: nn.Module, optimizers: list[torch.optim.Optimizer]) -> float:
    for each, optimizer in zip((model, mine), optimizers, strict=True):
        _step(each, optimizer)
    state = autopar.full_state_dict(mine)
    return max([0.0, *((value - model.state_dict()[name]).abs().max().item() for name, value in state.items())])


@pytest.mark.parametrize("groups", ["one", "two", "named"])
@pytest.mark.parametrize(("fix", "width"), [*SPLITS, STAGES], ids=str)
def test_an_optimizers_state_goes_from_one_device_to_ranks_and_back(
    pool: RankPool, fix: dict[str, Any], width: int, groups: str
):
    assert max(max(each) for each in pool.values(given_and_returned, fix, width, groups)) < 1e-5


@pytest.mark.parametrize("fix", [{"dp_replicate": 2}, STAGES[0]], ids=str)
def test_state_of_another_shape_than_its_parameters_goes_both_ways_too(pool: RankPool, fix: dict[str, Any]):
    assert max(max(each) for each in pool.values(given_and_returned, fix, 6, "factored")) < 1e-5


def wrong_optimizer_state(_rank: int, fix: dict[str, Any], wrong: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    mine = _compiled(model, fix)
    optimizer = _optimizer(mine, "named")
    state = _optimizer(model, "named").state_dict()
    if wrong == "size":
        state["param_groups"][0]["params"].pop()
    if wrong == "name":
        state["param_groups"][0]["param_names"][0] = "layers.9.bias"
    if wrong == "groups" and _rank == 1:
        optimizer = _optimizer(mine, "one")
    if wrong == "empty":
        state = {}
    if wrong == "model":
        optimizer = _optimizer(model, "one")
    autopar.load_optimizer_state_dict(mine, optimizer, state)


WRONG = {
    "groups": "the optimizer has 2, 1 parameter groups on ranks 0, 1",
    "size": "groups of 3, 5 parameters, and the optimizer, over all ranks, has 4, 5",
    "name": "group 0 of the optimizer state has other parameters .* layers.0.bias, layers.9.bias are in one of them",
    "empty": "the optimizer state is empty, and needs state and param_groups: .* load the file on all ranks",
    "model": "AdamW has 9 parameters that are not the compiled model's",
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("fix", [{"tp": 2}, STAGES[0]], ids=str)
def test_an_optimizer_state_of_other_parameters_is_refused_on_all_ranks(
    pool: RankPool, fix: dict[str, Any], wrong: str
):
    for outcome in pool.run(wrong_optimizer_state, fix, wrong):
        assert outcome.kind == "UsageError"
        assert re.search(WRONG[wrong], outcome.error), outcome.error


def test_the_full_state_of_a_model_that_is_not_compiled_is_refused():
    with pytest.raises(UsageError, match="Tied is no compiled model"):
        autopar.full_state_dict(Tied())
