"""A program made deeper is the program captured at that depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.capture import capture
from autopar.capture.deepen import LayersDifferError, deepened
from autopar.errors import CaptureError
from autopar.ir.graph import Graph
from autopar.ir.repetition import FEW, Repetition, repetition_of
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
    depth = FEW + 1 if name.startswith("mixtral") else 6  # a layer of experts takes long to capture

    assert deepened(_graph(name, FEW), {row: Repetition(depth)}) == _graph(name, depth)


def test_layers_before_and_behind_the_equal_ones_stay_as_they_are() -> None:
    """One dense layer, mixtures of experts, and behind them a layer that predicts a further token."""
    shallow = _graph("deepseek-tiny", 1 + FEW)

    assert deepened(shallow, {"layers": Repetition(4, before=1, behind=1)}) == _graph("deepseek-tiny", 5)


class Block(torch.nn.Module):
    """A layer of a kind, a letter: linear (l), with an activation (r), a constant (c), without a bias (b).

    What it reads beside the layer before is a constant for the gradient (d).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = torch.nn.Linear(8, 8, bias=kind != "b")

    def forward(self, *earlier: torch.Tensor) -> torch.Tensor:
        further = earlier[0].detach() if self.kind == "d" else earlier[0]
        x = earlier[0] if len(earlier) == 1 else further + earlier[-1]
        y = self.inner(x * torch.tensor(2.0) if self.kind == "c" else x)
        return x + (y.relu() if self.kind == "r" else y)


class Mixed(torch.nn.Module):
    """Layers of kinds that read so many layers before them; the loss reads the last one, but for `less`, and `seen`."""

    def __init__(self, kinds: str, reads: int = 1, seen: tuple[int, ...] = (), less: int = 0) -> None:
        super().__init__()
        self.reads, self.seen, self.less = reads, seen, less
        self.enter = torch.nn.Linear(8, 8)
        self.layers = torch.nn.ModuleList(Block(kind) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = [self.enter(x)]
        for layer in self.layers:
            results.append(layer(*results[-self.reads :]))
        return (results[-1 - self.less].relu() + sum(results[at].detach() for at in self.seen)).sum()


def _mixed(kinds: str, **how: Any) -> Graph:
    return capture(Mixed(kinds, **how), (torch.empty(2, 8),)).graph


@pytest.mark.parametrize("kinds", ["lr" * 5, "b" + "lr" * 5 + "l", "lblr" * 4 + "lb"])
def test_a_period_of_layers_is_repeated_where_they_differ_in_turns(kinds: str) -> None:
    row = repetition_of(kinds)
    assert row is not None
    assert row.more > 0

    assert deepened(_mixed("".join(row.kept(kinds))), {"layers": row}) == _mixed(kinds)


def test_a_last_layer_that_nobody_reads_may_lack() -> None:
    """A tower whose last but one states are read: what comes behind them is in no program."""
    row = Repetition(6, behind=1)

    assert deepened(_mixed("l" * row.few, less=1), {"layers": row}) == _mixed("l" * row.layers, less=1)


@pytest.mark.parametrize(("kind", "behind"), [("l", 2), ("d", 0)], ids=["and layers behind do", "in forward alone"])
def test_layers_that_read_beyond_their_neighbours_are_refused(kind: str, behind: int) -> None:
    row = Repetition(6, before=2, behind=behind)

    with pytest.raises(CaptureError, match="reads from the midst"):
        deepened(_mixed(kind * row.few, reads=2), {"layers": row})


def test_layers_whose_midst_is_read_are_refused() -> None:
    with pytest.raises(CaptureError, match="reads from the midst"):
        deepened(_mixed("l" * 5, seen=(3,)), {"layers": Repetition(6, before=1, behind=1)})


def test_layers_that_differ_are_refused() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=at == 1) for at in range(FEW))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.sum()

    with pytest.raises(LayersDifferError, match="full depth"):
        deepened(capture(Odd(), (torch.empty(2, 8),)).graph, {"layers": Repetition(6)})


def test_layers_with_constants_are_refused() -> None:
    with pytest.raises(CaptureError, match="constants"):
        deepened(_mixed("ccc"), {"layers": Repetition(6)})
