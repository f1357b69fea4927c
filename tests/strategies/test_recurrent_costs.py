"""What a recurrent layer takes: the operations of its products, a start for every step, and gates in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.costs.operators import flops, seconds
from autopar.costs.workspaces import workspace_bytes
from autopar.ir.graph import Graph, Op
from autopar.ir.placement import Replicate, Shard
from autopar.ir.strategy import MeshStrategy, Strategy
from cost_models.device import catalogued_device
from tests.support.remembering import remembered

H100 = catalogued_device("h100-sxm-80gb")
BATCH, FEATURES, HIDDEN = 16, 24, 32


class Recurrent(nn.Module):
    def __init__(self, kind: str, **options: int) -> None:
        super().__init__()
        self.network = getattr(nn, kind)(FEATURES, HIDDEN, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)[0].square().mean()


def graph_of(kind: str, steps: int, **options: int) -> Graph:
    with torch.device("meta"):
        return remembered(Recurrent(kind, **options), (torch.empty(BATCH, steps, FEATURES),)).graph


def layers(graph: Graph) -> list[Op]:
    """Return a layer and its gradient."""
    return [op for op in graph.ops if "_layer" in op.target]


def took(graph: Graph, op: Op, ranks: int = 1) -> float:
    """Return the seconds of an operator whose samples are split over so many ranks."""
    metas = [graph.meta(ref) for ref in op.refs]
    inputs = tuple((Shard(0) if meta.shape[0] == BATCH else Replicate(),) for meta in metas)
    axis = Strategy(tuple(each[0] for each in inputs), (None,) * len(op.outputs))
    split = MeshStrategy((axis,), inputs, tuple((Replicate(),) for _ in op.outputs))
    return float(seconds(op, metas, [split], (ranks,), H100)[0])


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_operations_are_those_of_the_products(kind: str, gates: int) -> None:
    graph = graph_of(kind, 10)
    forward, backward = (flops(op, [graph.meta(ref) for ref in op.refs]) for op in layers(graph))

    assert forward == 2 * 10 * BATCH * gates * HIDDEN * (FEATURES + HIDDEN)
    assert backward == 2 * forward


def test_a_projected_state_has_two_products_a_step() -> None:
    graph = graph_of("LSTM", 10, proj_size=8)
    forward, backward = (flops(op, [graph.meta(ref) for ref in op.refs]) for op in layers(graph))

    assert forward == 2 * 10 * BATCH * (4 * HIDDEN * (FEATURES + 8) + HIDDEN * 8)
    assert backward == 2 * forward


def test_steps_wait_for_one_another_and_fewer_samples_hardly_help() -> None:
    short, long = graph_of("LSTM", 100), graph_of("LSTM", 400)
    for few, many in zip(layers(short), layers(long), strict=True):
        assert 3.5 < took(long, many) / took(short, few) < 4.5
        assert took(long, many, ranks=4) > 0.5 * took(long, many)
    forward, backward = (took(long, op) for op in layers(long))
    assert backward > 1.5 * forward


def test_backward_holds_the_gates_of_the_forward_that_it_repeats() -> None:
    graph = graph_of("LSTM", 10, bidirectional=True)
    forward, backward = layers(graph)
    held = []
    for op in (forward, backward):
        metas = [graph.meta(ref) for ref in op.refs]
        whole = MeshStrategy((), ((),) * len(metas), ((),) * len(op.outputs))
        found = workspace_bytes(op, metas, [whole], (), H100)
        assert found is not None
        held.append(float(found[0]))

    assert held == [0.0, 2 * 10 * BATCH * (4 + 2) * HIDDEN * 4]
