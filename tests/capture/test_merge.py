"""Equal views and casts are one node of the program, inside a layer, with eager's values and gradients bit by bit."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from autopar.capture import Captured, capture
from tests.capture.program import run


class Branches(nn.Module):
    """Three linear layers that read one activation [..., 6], as query, key and value do."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.rms_norm(x, (6,))
        return x + (self.q(h) * self.k(h) + self.v(h)).float()


class Layers(nn.Module):
    """Layers whose linear parts autocast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branches(), Branches()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
        return x.square().mean()


def _casts_of_activations(captured: Captured) -> Counter[str]:
    """Return how often each activation is cast in forward, by the operator that makes it."""
    graph = captured.graph
    return Counter(
        op.refs[0].op
        for op in graph.ops
        if op.target == "aten._to_copy.default"
        and op.phase == "forward"
        and graph.by_name[op.refs[0].op].kind == "call"
        and op.outputs[0] is not None
        and op.outputs[0].dtype == "bfloat16"
    )


def test_layers_that_read_one_activation_share_its_cast():
    model, inputs = Layers(), (torch.randn(2, 3, 6),)

    captured = capture(model, inputs)
    found = run(captured, model, inputs)

    assert set(_casts_of_activations(captured).values()) == {1}
    assert len(_casts_of_activations(captured)) == len(model.layers)
    loss = model(*inputs)
    loss.backward()
    assert torch.equal(found.result, loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=0, atol=0)


def test_layers_that_read_a_value_of_before_all_layers_cast_it_each_for_itself():
    class Crossing(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.exp()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return sum(layer.q(h).float().square().mean() for layer in self.layers)  # type: ignore[union-attr,misc]

    captured = capture(Crossing(), (torch.randn(2, 3, 6),))

    assert list(_casts_of_activations(captured).values()) == [2]
