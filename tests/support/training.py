"""A few steps of a compiled model beside the model's own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autopar
from cost_models.cluster import ClusterSpec


@dataclass(frozen=True)
class Trained:
    """What training came to on one rank."""

    losses: list[float]
    """Of the compiled model."""

    held: list[str]
    """Every name of the parameters that this rank has."""

    worst_gradient: float
    """Largest relative error of a gradient, by norms."""


def call(model: nn.Module, example: Any) -> Any:
    """Return the model's result for keyword or positional arguments."""
    return model(**example) if isinstance(example, dict) else model(*example)


def loss_of(result: Any) -> torch.Tensor:
    """Return the loss among a model's results."""
    if isinstance(result, torch.Tensor):
        return result
    return result["loss"] if isinstance(result, dict) else result[-1]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its parts."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same_step(mine: nn.Module, reference: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Check that loss and gradients of a step in float64 are the reference's."""
    found, wanted = mine(*inputs), reference(*inputs)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    expected = dict(reference.named_parameters())
    for key, each in mine.named_parameters():
        torch.testing.assert_close(whole(each.grad), expected[key].grad, rtol=1e-9, atol=1e-12)


def train(
    reference: nn.Module, example: Any, cluster: str | ClusterSpec, fix: dict[str, Any], scale: float = 1.0
) -> Trained:
    """Train a model and its compiled copy for three steps of AdamW, backward from `scale` times the loss.

    Losses must agree at every step, and after them in evaluation.
    """
    mine = autopar.compile(copy.deepcopy(reference), cluster, example_inputs=example, fix=fix)
    both = (reference, mine)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in both]
    losses, worst = [], 0.0
    held = dict(mine.named_parameters(remove_duplicate=False))
    for _ in range(3):
        want, got = (loss_of(call(each, example)) for each in both)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        for loss, optimizer in zip((want, got), optimizers, strict=True):
            optimizer.zero_grad()
            (scale * loss).backward()
        for key, parameter in reference.named_parameters(remove_duplicate=False):
            if key in held:
                assert (parameter.grad is None) == (held[key].grad is None), key
            if key in held and parameter.grad is not None:
                error = (whole(held[key].grad) - parameter.grad).norm() / (parameter.grad.norm() + 1e-6 * scale)
                worst = max(worst, error.item())
        for optimizer in optimizers:
            optimizer.step()
        losses.append(got.item())
    for each in both:
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(call(mine, example)), loss_of(call(reference, example)))
    return Trained(losses, sorted(held), worst)
