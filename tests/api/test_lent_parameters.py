"""Evaluation programs that compute with parameters where training has them on another pipeline rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from tests.support.ranks import RankPool


class Stack(nn.Module):
    """Four layers; subclasses differ in what evaluation does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - y).square().mean()


class EvaluatedAhead(Stack):
    """A head and a buffer that training leaves out: no stage of it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss, in evaluation that of the head's."""
        if self.training:
            return super().forward(x, y)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.head(x) * self.scale - y).square().mean()


class Backwards(Stack):
    """Evaluation goes through the layers from behind."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        if self.training:
            return super().forward(x, y)
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return (x - y).square().mean()


class Encoder(nn.Module):
    """One encoder layer, whose parts training cuts apart: torch evaluates it as one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return (self.layer(self.inner(x)) - y).square().mean()


class Targets(nn.Module):
    """Two critics and their frozen copies, as agents have them: evaluation does not know that they are followers."""

    def __init__(self) -> None:
        super().__init__()
        self.critics, self.copies = (
            nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
            for _ in range(2)
        )
        self.copies.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        with torch.no_grad():
            aim = torch.min(*[copied(y) for copied in self.copies]).mean(-1)
        return sum(((critic(x).mean(-1) - aim).square().mean() for critic in self.critics), torch.zeros(()))


KINDS: dict[str, type[nn.Module]] = {
    "ahead": EvaluatedAhead,
    "backwards": Backwards,
    "encoder": Encoder,
    "targets": Targets,
}


def built(name: str) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    model = KINDS[name]().double()
    x, y = torch.randn(2, 8, 3, 8, dtype=torch.float64)
    return model, (x, y)


def evaluate(_rank: int, name: str, ranks: int, fix: dict[str, Any]) -> None:
    """Check that loss, step and evaluation are those of one device, before and after the step."""
    model, batch = built(name)
    mine = autopar.compile(built(name)[0], f"cpu:{ranks}", example_inputs=batch, fix=fix)
    for each in (model, mine):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        each(*batch).backward()
        optimizer.step()
    for rows in (8, 6):
        part = tuple(each[:rows] for each in batch)
        with torch.no_grad():
            torch.testing.assert_close(mine.eval()(*part), model.eval()(*part), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.train()(*batch), model.train()(*batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_evaluation_borrows_parameters_of_other_stages(pool: RankPool, name: str):
    pool.values(evaluate, name, 2, {"pp": 2, "microbatch": 2})


@pytest.mark.parametrize("name", ["ahead", "encoder"])
def test_parts_of_parameters_are_lent_to_the_same_place_of_another_mesh(four: RankPool, name: str):
    four.values(evaluate, name, 4, {"pp": 2, "tp": 2, "microbatch": 4})


def test_interleaved_stages_without_work_in_evaluation_pass_on_what_arrives(pool: RankPool):
    pool.values(evaluate, "encoder", 2, {"pp": 2, "interleave": 2, "schedule": "interleaved_1f1b", "microbatch": 2})


def evaluate_with_gradients(_rank: int) -> None:
    """Check what a call says that forgets `no_grad`, and that training goes on behind it."""
    _, batch = built("ahead")
    mine = autopar.compile(built("ahead")[0], "cpu:2", example_inputs=batch, fix={"pp": 2, "microbatch": 2})
    with pytest.raises(AutoparError, match=r"head\.\w+.* torch\.no_grad\(\)"):
        mine.eval()(*batch)
    mine.train()(*batch).backward()


def test_evaluation_with_gradients_is_told_of_no_grad(pool: RankPool):
    pool.values(evaluate_with_gradients)
