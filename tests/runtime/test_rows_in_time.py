"""Samples that point at themselves, and tensors begun without values, in micro-batches: as of the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar

SAMPLES, WIDTH, CLASSES = 12, 8, 5


class Picked(nn.Module):
    """The mean of what each sample's own place in a table of scores holds, as policies and likelihoods are written."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)])
        self.first = nn.Parameter(torch.randn(CLASSES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss: of the picked alone and beside what was given the same gradient."""
        for layer in self.layers:
            x = layer(torch.tanh(x))
        rows = torch.arange(len(x))
        picked = x.log_softmax(-1)[rows, y]
        return (torch.logsumexp(x + self.first, 1) - self.first[y] - x[rows, y]).mean() - 0.5 * picked.mean()


class Begun(nn.Module):
    """Tokens behind one that is learned, written into a tensor made empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Embedding(CLASSES, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        tokens = torch.empty(x.shape[0], 3, WIDTH)
        tokens[:, 0] = self.token
        tokens[:, 1:] = torch.stack([self.embed(y), x], 1)
        for layer in self.layers:
            tokens = tokens + torch.tanh(layer(tokens))
        return (tokens[:, 0] * tokens[:, 2]).sum(-1).square().mean()


@pytest.mark.parametrize("kind", [Picked, Begun])
def test_a_step_in_micro_batches_is_that_of_the_whole_batch(kind: type[nn.Module]):
    torch.manual_seed(0)
    model = kind()
    alone = copy.deepcopy(model)
    inputs = torch.randn(SAMPLES, WIDTH), torch.randint(CLASSES, (SAMPLES,))

    compiled = autopar.compile(model, "cpu:1", example_inputs=inputs, fix={"microbatch": 4})
    found, wanted = compiled(*inputs), alone(*inputs)
    found.backward()
    wanted.backward()

    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    gradients = [[each.grad for each in one.parameters()] for one in (compiled, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


class Weighed(Picked):
    """Weights of samples that are a table of the model's, a row for each: other micro-batches have other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 2.0, SAMPLES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = layer(torch.tanh(x))
        return (self.weights * x.log_softmax(-1)[torch.arange(len(x)), y]).mean()


def test_weights_that_differ_from_sample_to_sample_are_not_taken_for_alike():
    inputs = torch.randn(SAMPLES, WIDTH), torch.randint(CLASSES, (SAMPLES,))

    with pytest.raises(autopar.errors.InfeasibleError, match="the batch cannot be cut into micro-batches"):
        autopar.compile(Weighed(), "cpu:1", example_inputs=inputs, fix={"microbatch": 4})
