"""Evaluation that writes buffers, where training has them on another pipeline rank or on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime import borrowing
from tests.support.ranks import RankPool


class Stack(nn.Module):
    """Four layers, a head that training leaves out, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.zeros(8))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make of an input."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Cached(Stack):
    """Writes buffers that training does not know, of what the last stage makes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.through(x)
        if not self.training:
            self.calls += 1
            self.cache.lerp_(x.mean(0), 0.5)
            x = self.head(x) + self.cache
        return (x - y).square().mean()


class Counted(Stack):
    """Reads a counter on both stages in training; evaluation counts on the first alone."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        count = self.calls.to(x.dtype)
        if not self.training:
            self.calls += 1
            return (self.through(x * (count + 1)) - y).square().mean()
        return (self.through(x * (count + 1)) * (count + 1) - y).square().mean()


KINDS: dict[str, type[nn.Module]] = {"cached": Cached, "counted": Counted}


def built(name: str) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    model = KINDS[name]().double()
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    return model, (x, y)


def alternate(_rank: int, name: str, ranks: int, fix: dict[str, Any]) -> None:
    """Check losses and buffers of steps of training and evaluation by turns."""
    model, batch = built(name)
    mine = autopar.compile(built(name)[0], f"cpu:{ranks}", example_inputs=batch, fix=fix)
    for _ in range(3):
        found = mine.train()(*batch)
        wanted = model.train()(*batch)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(mine.eval()(*batch), model.eval()(*batch), rtol=1e-12, atol=1e-12)
        expected = dict(model.named_buffers())
        for key, each in mine.named_buffers():
            torch.testing.assert_close(each, expected[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_buffers_that_evaluation_writes_are_those_of_one_device(pool: RankPool, name: str):
    pool.values(alternate, name, 2, {"pp": 2, "microbatch": 8})


def test_what_evaluation_writes_goes_to_the_same_place_of_another_mesh(four: RankPool):
    four.values(alternate, "cached", 4, {"pp": 2, "tp": 2, "microbatch": 8})


def count_loans(_rank: int) -> list[int]:
    """Return the bytes that each of several steps of evaluation sends between ranks for it."""
    model, batch = built("cached")
    mine = autopar.compile(built("cached")[0], "cpu:2", example_inputs=batch, fix={"pp": 2, "microbatch": 8})
    for each in (model, mine):
        torch.optim.SGD(each.parameters(), lr=0.1)
    sent: list[int] = []
    real = borrowing.dist.broadcast

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    found = []

    def evaluate() -> None:
        sent.clear()
        with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(borrowing.dist, "broadcast", counted)
            torch.testing.assert_close(mine.eval()(*batch), model.eval()(*batch), rtol=1e-12, atol=1e-12)
        found.append(sum(sent))

    evaluate()
    evaluate()
    for each in (model, mine):
        for key, parameter in each.named_parameters():
            if key == "head.weight":
                parameter.data.mul_(2)  # no version tells of it
    evaluate()
    for each in (model, mine):
        each.train()(*batch)
    evaluate()
    return found


def test_what_did_not_change_is_not_lent_again(pool: RankPool):
    first, again, changed, trained = pool.values(count_loans)[0]

    weight, bias = 8 * 8 * 8, 8 * 8
    assert first - again == weight + bias
    assert changed - again == weight
    assert trained == first
