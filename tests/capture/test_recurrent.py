"""Recurrent networks: an operator a layer, with the numbers that torch's own have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.autocasting import policy
from autopar.ir.graph import Graph
from tests.capture.program import run

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": ("LSTM", {}),
    "lstm, both directions": ("LSTM", {"bidirectional": True, "batch_first": True}),
    "lstm, projected": ("LSTM", {"proj_size": 3, "bidirectional": True}),
    "gru": ("GRU", {"batch_first": True}),
    "gru, both directions, no biases": ("GRU", {"bidirectional": True, "bias": False}),
    "tanh": ("RNN", {}),
    "relu": ("RNN", {"nonlinearity": "relu", "num_layers": 1}),
}


class Recurrent(nn.Module):
    """A network of two layers, its output and all of its last states."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.network = getattr(nn, kind)(8, 6, **{"num_layers": 2, **options})

    def forward(self, x: Tensor) -> Tensor:
        made, last = self.network(x)
        states = last if isinstance(last, tuple) else (last,)
        return made.square().mean() + sum((each * (each + 1)).mean() for each in states)


def layers(graph: Graph) -> list[str]:
    """Return the recurrent operators of a program."""
    return [op.target.split(".")[1] for op in graph.ops if "_layer" in op.target and "norm" not in op.target]


@pytest.mark.parametrize("name", NETWORKS)
def test_is_an_operator_a_layer_with_torch_s_numbers(name: str) -> None:
    torch.manual_seed(0)
    kind, options = NETWORKS[name]
    model = Recurrent(kind, options).double()
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    captured = capture(model, (x,))

    count = model.network.num_layers
    mine = "lstm_layer" if kind == "LSTM" else "rnn_layer"
    assert layers(captured.graph) == [mine] * count + [f"{mine}_backward"] * count
    found = run(captured, model, (x,))
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(found.result, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)


def test_begins_with_the_states_that_are_given() -> None:
    class Begun(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.LSTM(8, 6, 2)

        def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
            return self.network(x, (hidden, cell))[0].square().mean()

    model = Begun().double()
    given = tuple(torch.randn(*size, dtype=torch.float64) for size in ((3, 4, 8), (2, 4, 6), (2, 4, 6)))
    captured = capture(model, given)
    torch.testing.assert_close(run(captured, model, given).result, model(*given))


def test_drops_out_between_layers_and_not_behind_the_last() -> None:
    model = Recurrent("GRU", {"dropout": 0.5, "num_layers": 3})
    graph = capture(model, (torch.randn(3, 4, 8),)).graph
    assert sum(op.target == "aten.native_dropout.default" for op in graph.ops) == 2


def test_under_autocast_it_runs_in_16_bits() -> None:
    with policy("bf16"):
        graph = capture(Recurrent("LSTM", {}), (torch.randn(3, 4, 8),)).graph
    forward = next(op for op in graph.ops if op.target == "autopar_ops.lstm_layer.default")
    assert {graph.meta(ref).dtype for ref in forward.refs} == {"bfloat16"}


def test_a_long_sequence_has_as_many_operators_as_a_short_one() -> None:
    model = Recurrent("LSTM", {"batch_first": True})
    short, long = (capture(model, (torch.randn(4, steps, 8),)).graph for steps in (3, 500))
    assert len(short.ops) == len(long.ops)
