"""Few layers stand for many only if forward does with them what it does with the many."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

from autopar.ir.repetition import FEW, Repetition
from autopar.models.layer_work import does_the_same, layer_work

DEEP = 9


class Layer(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.inner(x if first is None else x + first)


class Plain(nn.Module):
    """Layers one behind the other."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(at) for at in range(layers))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.loss(self.states(x))

    def states(self, x: torch.Tensor) -> list[torch.Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(self.step(layer, states))
        return states

    def step(self, layer: nn.Module, states: list[torch.Tensor]) -> torch.Tensor:
        return layer(states[-1])

    def loss(self, states: list[torch.Tensor]) -> torch.Tensor:
        return states[-1].sum()


class Branching(Plain):
    """Asks for a value, as masks do that are skipped where nothing is masked."""

    def loss(self, states: list[torch.Tensor]) -> torch.Tensor:
        return states[-1].sum() if (states[0] > 0).all().item() else states[-1].mean()


class FirstToAll(Plain):
    """Layers that read the first one's result."""

    def step(self, layer: nn.Module, states: list[torch.Tensor]) -> torch.Tensor:
        return layer(states[-1], states[1] if len(states) > 1 else None)


class ByNumber(Plain):
    """A layer that does more than its kin."""

    def step(self, layer: nn.Module, states: list[torch.Tensor]) -> torch.Tensor:
        return layer(states[-1], states[-1] if layer.at == 6 else None)


class ByPlace(Plain):
    """The states of a layer are read, told by its number."""

    def loss(self, states: list[torch.Tensor]) -> torch.Tensor:
        return states[-1].sum() + states[min(6, len(states) - 1)].sum()


class Midst(Plain):
    """The states of a layer in the midst are read, in the short model as well as in the deep one."""

    def loss(self, states: list[torch.Tensor]) -> torch.Tensor:
        return states[-1].sum() + states[len(states) // 2].sum()


class FarBack(Plain):
    """The last layer reads what one of the first made."""

    def step(self, layer: nn.Module, states: list[torch.Tensor]) -> torch.Tensor:
        return layer(states[-1], states[1] if len(states) == len(self.layers) else None)


class OfValues(Plain):
    """As many rows go on as there are positive ones."""

    def loss(self, states: list[torch.Tensor]) -> torch.Tensor:
        return states[-1][states[-1] > 0].sum()


def _same(kind: type[Plain]) -> bool | None:
    rows = {"layers": Repetition(DEEP)}
    inputs = (torch.empty(2, 8, device="meta"),)
    with torch.device("meta"):
        models = kind(DEEP), kind(FEW)
    deep, few = (layer_work(model, inputs, rows) for model in models)
    assert [model.calls for model in models] == [0, 0], "the models themselves are not run"
    return None if deep is None or few is None else does_the_same(deep, few, rows)


@pytest.mark.parametrize("kind", [Plain, Branching])
def test_layers_that_only_follow_each_other_do_the_same(kind: type[Plain]):
    assert _same(kind) is True


@pytest.mark.parametrize("kind", [FirstToAll, ByNumber, ByPlace, Midst, FarBack])
def test_layers_told_apart_by_their_number_do_not(kind: type[Plain]):
    assert _same(kind) is False


class Loud(Plain):
    """Warns, logs and draws."""

    def loss(self, states: list[torch.Tensor]) -> torch.Tensor:
        warnings.warn("of forward", stacklevel=1)
        logging.getLogger("loud").warning("of forward")
        return states[-1].sum() * torch.rand(())


def test_nobody_notices_that_forward_ran(caplog: pytest.LogCaptureFixture):
    torch.manual_seed(0)
    before = torch.get_rng_state()

    assert _same(Loud) is True

    assert torch.equal(torch.get_rng_state(), before)
    assert not caplog.records
    logging.getLogger("loud").warning("of ours")
    assert len(caplog.records) == 1


def test_what_takes_values_to_say_is_not_said():
    assert _same(OfValues) is None
