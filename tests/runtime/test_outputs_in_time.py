"""What a model returns beside its loss, of a step of several micro-batches: as of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.errors import InfeasibleError

SAMPLES, TIME, CLASSES = 12, 3, 5

Made = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Returning(nn.Module):
    """Returns what is made of the logits [b, t, c], the targets [b, t] and the loss."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, CLASSES)])
        self.made = made

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """Return the loss, and what is made beside it."""
        for layer in self.layers:
            x = layer(torch.tanh(x))
        loss = functional.cross_entropy(x.flatten(0, 1), y.flatten())
        with torch.no_grad():
            return loss, self.made(x.detach(), y, loss.detach())


def perplexity(logits: torch.Tensor, _y: torch.Tensor, _loss: torch.Tensor) -> torch.Tensor:
    """Return that of the use of classes over all samples."""
    used = functional.one_hot(logits.argmax(-1), CLASSES).float().mean((0, 1))
    return torch.exp(-(used * (used + 1e-10).log()).sum())


RETURNED: dict[str, Made] = {
    "largest": lambda x, y, loss: x.abs().max(),
    "least of a class": lambda x, y, loss: x.amin((0, 1)),
    "span": lambda x, y, loss: x.max() / x.min(),
    "time first": lambda x, y, loss: x.transpose(0, 1),
    "time first, flat": lambda x, y, loss: x.transpose(0, 1).flatten(0, 1),
    "flat": lambda x, y, loss: x.flatten(0, 1),
    "hits": lambda x, y, loss: (x.argmax(-1) == y).sum(),
    "exponential": lambda x, y, loss: loss.exp(),
    "decibels": lambda x, y, loss: {"psnr": -10 * torch.log10(loss), "loss": 2 * loss},
    "ratio": lambda x, y, loss: (x.argmax(-1) == y).sum() / (y > 1).sum(),
    "ratio of sums": lambda x, y, loss: x.square().sum() / (x.abs().sum() + 1.0),
    "perplexity": perplexity,
    "any": lambda x, y, loss: (x > 3).any(),
    "all of a class": lambda x, y, loss: (x < 1).flatten(0, 1).all(0),
    "none": lambda x, y, loss: ~x.isnan().any(),
    "any of a sample": lambda x, y, loss: (x > 1).flatten(1).any(1),
    "deviation": lambda x, y, loss: x.std(),
    "variances": lambda x, y, loss: x.var((0, 1), correction=0),
    "deviations of times": lambda x, y, loss: torch.std_mean(x, 0),
    "standardised": lambda x, y, loss: (x[:, 0] - x[:, 0].mean(0)) / x[:, 0].std(0),
    "median": lambda x, y, loss: x.amax((1, 2)).median(),
    "explained": lambda x, y, loss: 1 - (x.mean((1, 2)) - y[:, 0]).var() / y[:, 0].float().var(),
    "of inputs alone": lambda x, y, loss: y.median(),
    "range": lambda x, y, loss: x.max() - x.min(),
    "mean of the largest": lambda x, y, loss: x.amax((0, 1)).mean(),
    "mean of the largest, flat": lambda x, y, loss: x.flatten(0, 1).amax(0).mean(),
    "in an order": lambda x, y, loss: x[x[:, 0, 0].sort()[1]].tanh(),
    "an input": lambda x, y, loss: y,
    "a part of an input": lambda x, y, loss: {"labels": y, "first": y[:, 0], "both": (y, y)},
    "covariance": lambda x, y, loss: (x.mean((1, 2)) - x.mean()) @ (x.amax((1, 2)) - x.amax((1, 2)).mean()) / 11,
    "best": lambda x, y, loss: x.mean((1, 2)).argmax(),
    "sorted": lambda x, y, loss: x.mean((1, 2)).sort().values,
    "first": lambda x, y, loss: x[0],
    "norm": lambda x, y, loss: x.norm(),
    "stacked layers": lambda x, y, loss: torch.stack([x[:, 0], x[:, 1], x[:, 2]]),
    "rest": lambda x, y, loss: 1 - (x.argmax(-1) == y).float().mean(),
}


def example(made: Made) -> tuple[Returning, tuple[torch.Tensor, torch.Tensor]]:
    """Return a model and its call."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, TIME, 4) * torch.linspace(0.1, 2, SAMPLES)[:, None, None]
    return Returning(made), (x, torch.randint(CLASSES, (SAMPLES, TIME)))


@pytest.mark.parametrize("name", RETURNED)
def test_what_is_returned_is_that_of_the_whole_batch(name: str):
    model, inputs = example(RETURNED[name])
    wanted = model(*inputs)
    wanted[0].backward()
    gradients = [each.grad.clone() for each in model.parameters()]
    model.zero_grad(set_to_none=True)

    compiled = autopar.compile(model, "cpu:1", example_inputs=inputs, fix={"microbatch": 4})
    found = compiled(*inputs)
    found[0].backward()

    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close([each.grad for each in model.parameters()], gradients, rtol=1e-5, atol=1e-6)


def test_large_values_of_which_samples_give_no_few_numbers_are_refused_by_their_line():
    model, inputs = example(lambda x, y, loss: x.repeat(1, 1, 200).median())

    with pytest.raises(InfeasibleError, match=r"aten\.median\.default \(.*test_outputs_in_time\.py:\d+\) needs all"):
        autopar.compile(model, "cpu:1", example_inputs=inputs, fix={"microbatch": 4})


def test_metrics_are_computed_of_what_ranks_have_in_common_and_are_not_trained_on():
    model, inputs = example(RETURNED["decibels"])

    loss, found = autopar.compile(model, "cpu:1", example_inputs=inputs)(*inputs)

    assert not found["psnr"].requires_grad
    torch.testing.assert_close(found["psnr"], -10 * torch.log10(loss.detach()))


LARGE: dict[str, Made] = {
    "deviation": lambda x, y, loss: x.repeat(1, 1, 200).std(),
    "variances": lambda x, y, loss: 100 + x.repeat(1, 1, 200).var((0, 2), keepdim=True),
    "with the mean": lambda x, y, loss: torch.var_mean(x.repeat(1, 1, 200) + 1e3, correction=0),
    "any": lambda x, y, loss: (x.repeat(1, 1, 200) > 3).any(),
    "all": lambda x, y, loss: (x.repeat(1, 1, 200) > -9).all(0),
    "norm": lambda x, y, loss: x.repeat(1, 1, 200).norm(),
    "range": lambda x, y, loss: x.repeat(1, 1, 200).max() - x.repeat(1, 1, 200).min(),
    "norm of order 3": lambda x, y, loss: torch.linalg.vector_norm(x.repeat(1, 1, 200).double(), ord=3),
    "norms of classes": lambda x, y, loss: torch.linalg.vector_norm(x.repeat(1, 200, 1).double(), ord=0.5, dim=(0, 1)),
    "logarithm of a sum": lambda x, y, loss: x.repeat(1, 200, 1).logsumexp((0, 1)),
    "largest norm": lambda x, y, loss: torch.linalg.vector_norm(x.repeat(1, 1, 200), ord=float("inf")),
}
"""Of 36000 elements, which not every rank is to have."""


@pytest.mark.parametrize("name", LARGE)
def test_reductions_of_large_values_are_composed_of_those_of_samples(name: str):
    model, inputs = example(LARGE[name])
    wanted = model(*inputs)

    compiled = autopar.compile(model, "cpu:1", example_inputs=inputs, fix={"microbatch": 4})

    torch.testing.assert_close(compiled(*inputs), wanted, rtol=1e-5, atol=1e-6)
