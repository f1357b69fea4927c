"""A program made deeper is the program captured at that depth."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture
from autopar.capture.deepen import SHALLOW, deepened
from autopar.errors import CaptureError
from autopar.ir.graph import Graph
from autopar.models import zoo


def _graph(name: str, layers: int) -> Graph:
    overrides = {"layers": str(layers)}
    model, inputs, _ = zoo.build(name, batch=4, seq=0 if name.startswith("vit") else 16, overrides=overrides)
    return capture(model, inputs).graph


QUICK = {"gpt-tiny", "mixtral-tiny"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,))
        for name in ("gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "mixtral-tiny")
    ],
)
def test_repeating_layers_of_a_shallow_capture_gives_the_deep_capture(name: str) -> None:
    row = "blocks" if name.startswith("gpt") else "layers"
    depth = SHALLOW + 1 if name.startswith("mixtral") else 6  # a layer of experts takes long to capture

    assert deepened(_graph(name, SHALLOW), {row: depth}) == _graph(name, depth)


def test_layers_before_and_behind_the_equal_ones_stay_as_they_are() -> None:
    """One dense layer, mixtures of experts, and behind them a layer that predicts a further token."""
    shallow = _graph("deepseek-tiny", 1 + SHALLOW)

    assert deepened(shallow, {"layers": 6}, first=1) == _graph("deepseek-tiny", 5)


def test_layers_that_differ_are_refused() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=at == 1) for at in range(SHALLOW))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.sum()

    with pytest.raises(CaptureError, match="full depth"):
        deepened(capture(Odd(), (torch.empty(2, 8),)).graph, {"layers": 6})


def test_layers_with_constants_are_refused() -> None:
    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(SHALLOW))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x) * torch.tensor(2.0)
            return x.sum()

    with pytest.raises(CaptureError, match="full depth"):
        deepened(capture(Constant(), (torch.empty(2, 8),)).graph, {"layers": 6})
