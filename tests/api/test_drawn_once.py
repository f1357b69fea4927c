"""Random numbers that all samples share are drawn once, in however many micro-batches the step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.support.ranks import RankPool
from tests.support.training import whole

MADE: dict[str, Callable[[nn.Linear], torch.Tensor]] = {
    "vector": lambda _: 0.5 + torch.rand(4),
    "number": lambda _: 0.5 + torch.rand(()),
    "dropped weight": lambda linear: nn.functional.dropout(linear.weight, 0.5).sum(0),
    "rows": lambda _: 0.5 + torch.rand(8, 1),
}


class Noisy(nn.Module):
    """Features times random numbers."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.made = made

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the loss, the random numbers and the features."""
        noise = MADE[self.made](self.linear)
        features = self.linear(x).tanh() * noise
        return features.square().mean(), noise.detach(), features.detach()


def told(_rank: int, made: str, fix: dict[str, Any]) -> tuple[float, float, list[float]]:
    """Return how far features and loss are from what the returned numbers make of them, and the scale of each row."""
    torch.manual_seed(0)
    model, x = Noisy(made), torch.randn(8, 4)
    compiled = autopar.compile(model, "cpu:2", example_inputs=(x,), fix=fix)
    loss, noise, features = map(whole, compiled(x))
    before = model.linear(x).tanh().detach()
    wanted = before * noise
    off_loss = (loss.detach() - wanted.square().mean()).abs().item()
    return (features - wanted).abs().max().item(), off_loss, (features / before)[:, 0].tolist()


@pytest.mark.parametrize("fix", [{"dp_replicate": 2, "microbatch": 2}, {"tp": 2, "microbatch": 2}], ids=str)
@pytest.mark.parametrize("made", ["vector", "number", "dropped weight"])
def test_what_all_samples_share_is_the_same_in_all_microbatches_and_is_what_is_returned(
    pool: RankPool, made: str, fix: dict[str, Any]
):
    for off, off_loss, _ in pool.values(told, made, fix):
        assert off < 1e-6
        assert off_loss < 1e-6


@pytest.mark.parametrize("fix", [{"dp_replicate": 2, "microbatch": 2}, {"tp": 2, "microbatch": 2}], ids=str)
def test_rows_of_noise_differ_from_microbatch_to_microbatch(pool: RankPool, fix: dict[str, Any]):
    for _, _, scales in pool.values(told, "rows", fix):
        assert len({round(each, 4) for each in scales}) == 8
