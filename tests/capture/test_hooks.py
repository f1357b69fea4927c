"""Hooks and functions of a model that reach it by their closures: captured as they act on the model that calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from tests.capture.program import run


class Observed(nn.Module):
    """Two layers, what the first makes kept aside, and a loss of both."""

    def __init__(self, observe: Callable[[Any], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: dict[str, Tensor] = {}
        self.scale = nn.Parameter(torch.full((), 3.0))
        observe(self)

    def forward(self, x: Tensor) -> Tensor:
        made = self.second(self.first(x))
        return made.square().mean() + self.kept["first"].square().mean()


def by_lambda(model: Any) -> None:
    model.first.register_forward_hook(lambda _module, _inputs, output: model.kept.update(first=output))


def by_factory(model: Any) -> None:
    def keeping(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            model.kept[name] = output

        return keep

    model.first.register_forward_hook(keeping("first"))


def by_parameter(model: Any) -> None:
    model.second.register_forward_pre_hook(lambda _module, inputs: inputs[0] * model.scale)
    by_lambda(model)


def by_forward(model: Any) -> None:
    inside = model.first.forward

    def forward(x: Tensor) -> Tensor:
        model.kept["first"] = inside(x) * model.scale
        return model.kept["first"]

    model.first.forward = forward


@pytest.mark.parametrize("observe", [by_lambda, by_factory, by_parameter, by_forward])
@pytest.mark.filterwarnings("ignore:forward of Observed changes the attribute")
def test_a_function_reads_the_model_that_calls_it(observe: Callable[[Any], None]):
    torch.manual_seed(0)
    model, x = Observed(observe), torch.randn(4, 4)

    found = run(capture(model, (x,)), model, (x,))

    assert not model.kept
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(found.result, loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found.gradients[name], parameter.grad)
