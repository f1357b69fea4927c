"""A program made deeper is the program captured at that depth."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture
from autopar.capture.deepen import SHALLOW, deepened
from autopar.errors import CaptureError
from autopar.ir.graph import Arg, Graph, Ref
from autopar.models import zoo


def _graph(name: str, layers: int) -> Graph:
    overrides = {"layers": str(layers)}
    model, inputs, _ = zoo.build(name, batch=4, seq=0 if name.startswith("vit") else 16, overrides=overrides)
    return capture(model, inputs).graph


def _described(graph: Graph) -> list[object]:
    """Return a program without the names of its operators: each is its place."""

    def shown(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return (graph.position[arg.op], arg.index)
        return tuple(map(shown, arg)) if isinstance(arg, tuple) else arg

    ops = [
        (
            op.kind,
            op.target,
            op.module,
            op.phase,
            op.outputs,
            shown(op.args),
            graph.position[graph.representative(op.name)],
        )
        for op in graph.ops
    ]
    outputs = [
        (o.kind, graph.position.get(o.name, -1), o.ref and (graph.position[o.ref.op], o.ref.index))
        for o in graph.outputs
    ]
    return [ops, outputs]


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny"])
def test_repeating_layers_of_a_shallow_capture_gives_the_deep_capture(name: str) -> None:
    assert _described(deepened(_graph(name, SHALLOW), 6)) == _described(_graph(name, 6))


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
        deepened(capture(Odd(), (torch.empty(2, 8),)).graph, 6)
