"""States as a single device has them: gathered from all ranks, and given to an optimizer on ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


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


def test_the_full_state_of_a_model_that_is_not_compiled_is_refused():
    with pytest.raises(UsageError, match="Tied is no compiled model"):
        autopar.full_state_dict(Tied())
