"""Steps of several micro-batches on two gloo ranks against the model's own step over the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.errors import InfeasibleError
from tests.rewrite.test_microbatches import models
from tests.support.ranks import RankPool
from tests.support.training import Trained, train


def run(_rank: int, name: str, cluster: str, fix: dict[str, int], scale: float = 1.0) -> Trained:
    return train(*models()[name], cluster, fix, scale)


@pytest.mark.parametrize(
    "fix",
    [{"dp_replicate": 2, "microbatch": 1}, {"tp": 2, "microbatch": 2}, {"dp_shard": 2, "zero": 3, "microbatch": 1}],
    ids=["data", "tensor", "sharded"],
)
@pytest.mark.parametrize("name", ["mlp", "tied", "weighted"])
def test_steps_of_micro_batches_equal_the_whole_batchs(pool: RankPool, name: str, fix: dict[str, int]):
    first, second = pool.values(run, name, "cpu:2", fix)

    assert first.losses == second.losses
    assert max(first.worst_gradient, second.worst_gradient) < 1e-4


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_one_rank_accumulates_and_scales_with_the_loss(scale: float):
    done = run(0, "weighted", "cpu:1", {"microbatch": 2}, scale)

    assert done.worst_gradient < 1e-4


class Iterated(nn.Module):
    """Buffers that forward changes: the steps so far, and the weight's largest direction, nearer at each step."""

    def __init__(self, of_batch: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.of_batch = of_batch
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("direction", torch.randn(6))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        if self.training:
            self.steps += 1
            with torch.no_grad():
                self.direction.copy_(functional.normalize(self.weight.T @ (self.weight @ self.direction), dim=0))
                if self.of_batch is not None:
                    self.last.mul_(0.9).add_(self.of_batch(x))
        return (x @ self.weight / (self.weight @ self.direction).norm()).square().mean()


def test_buffers_change_once_a_step_however_many_micro_batches():
    torch.manual_seed(0)
    model = Iterated(torch.sum)
    mine = autopar.compile(Iterated(torch.sum), "cpu:1", example_inputs=(torch.randn(8, 6),), fix={"microbatch": 2})
    mine.load_state_dict(model.state_dict())

    for _ in range(3):
        x = torch.randn(8, 6)
        torch.testing.assert_close(mine(x), model(x))

    assert mine.steps == model.steps == 3
    torch.testing.assert_close(mine.direction, model.direction)
    torch.testing.assert_close(mine.last, model.last)


def test_a_buffer_made_of_the_whole_batch_refuses_micro_batches_and_is_named():
    model = Iterated(lambda x: x.flatten().median())
    with pytest.raises(InfeasibleError, match=r"new value of buffer last comes of all samples"):
        autopar.plan(model, "cpu:1", example_inputs=(torch.randn(8, 6),), fix={"microbatch": 2})


class Counting(nn.Module):
    """A layer that counts how often each of its experts was chosen, and keeps a running mean of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("load", torch.zeros(6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return its values."""
        made = (self.linear(x) - self.mean).tanh()
        with torch.no_grad():
            self.load.add_(functional.one_hot(made.argmax(-1), 6).sum(0).to(x.dtype))
            self.mean.mul_(0.9).add_(made.mean(0), alpha=0.1)
        return x + made


class Counted(nn.Module):
    """The loss of layers that count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def counted(_rank: int, fix: dict[str, int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    batches = torch.randn(3, 8, 6)
    model = Counted() if not fix else autopar.compile(Counted(), "cpu:2", example_inputs=(batches[0],), fix=fix)
    losses = []
    for x in batches:
        loss = model(x)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: each.clone() for name, each in model.named_buffers()}


@pytest.mark.parametrize(
    "fix",
    [
        {"pp": 2, "microbatch": 2},
        {"dp_replicate": 2, "microbatch": 2},
        {"tp": 2, "microbatch": 4},
        {"tp": 2, "microbatch": 2, "batch_overlap": 2},
    ],
    ids=str,
)
def test_buffers_that_add_up_over_samples_do_over_micro_batches(pool: RankPool, fix: dict[str, int]):
    losses, buffers = counted(0, {})

    told = pool.values(counted, fix)

    held: dict[str, torch.Tensor] = {}
    for got, mine in told:
        assert got == pytest.approx(losses, rel=1e-5)
        held |= mine
    torch.testing.assert_close(held, buffers)
