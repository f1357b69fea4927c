"""Tensors that torch leaves unwritten (conjugates) are written in captured programs; source of graphs is not."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autopar.capture import capture
from tests.capture.program import run


def test_conjugates_are_values_and_no_marks_on_a_view():
    class Conjugated(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(super().forward(x).unflatten(-1, (2, 2)))
            return (pairs * pairs.conj().mT).imag.square().sum()

    model, x = Conjugated(4, 4), torch.randn(2, 2, 4)

    captured = capture(model, (x,))
    found = run(captured, model, (x,))
    model(x).backward()

    assert not {op.target for op in captured.graph.ops} & {"aten._conj.default", "aten._neg_view.default"}
    assert not any(node.meta["val"].is_conj() for node in captured.joint.graph.nodes if "val" in node.meta)
    torch.testing.assert_close(found.gradients["weight"], model.weight.grad)


def test_conjugate_of_a_number_is_a_number():
    class Turned(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (1j * super().forward(x)).exp().imag.sum()

    model, x = Turned(4, 4), torch.randn(2, 4)

    found = run(capture(model, (x,)), model, (x,))
    model(x).backward()

    torch.testing.assert_close(found.gradients["weight"], model.weight.grad)


def test_graphs_on_the_way_are_not_written_as_source(monkeypatch: pytest.MonkeyPatch):
    written, own = [], fx.Graph.python_code
    monkeypatch.setattr(fx.Graph, "python_code", lambda *given, **how: written.append(given) or own(*given, **how))

    capture(nn.Linear(4, 4), (torch.randn(2, 4),))

    assert len(written) == 2  # what Dynamo and AOTAutograd themselves run
