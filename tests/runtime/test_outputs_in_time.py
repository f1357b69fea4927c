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


def test_what_no_terms_add_up_to_is_refused_by_its_line():
    model, inputs = example(lambda x, y, loss: x.std())

    with pytest.raises(InfeasibleError, match=r"aten\.std\.correction \(.*test_outputs_in_time\.py:\d+\) needs all"):
        autopar.compile(model, "cpu:1", example_inputs=inputs, fix={"microbatch": 4})


def test_metrics_are_computed_of_what_ranks_have_in_common_and_are_not_trained_on():
    model, inputs = example(RETURNED["decibels"])

    loss, found = autopar.compile(model, "cpu:1", example_inputs=inputs)(*inputs)

    assert not found["psnr"].requires_grad
    torch.testing.assert_close(found["psnr"], -10 * torch.log10(loss.detach()))
