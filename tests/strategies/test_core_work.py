"""Work on one element, row or window after the other: what a CPU core takes beside memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.costs import operators
from autopar.costs.core_work import evaluations
from autopar.ir.graph import Graph, Op
from autopar.ir.placement import Replicate
from autopar.ir.strategy import MeshStrategy, Strategy
from cost_models.device import catalogued_device


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return (self.function(x, rows) * self.scale).sum()


def _found(function: Callable[[Tensor, Tensor], Tensor], named: str, *shape: int) -> tuple[Graph, Op]:
    with torch.device("meta"):
        inputs = torch.empty(*shape), torch.zeros(32, dtype=torch.int64)
        graph = capture(Calls(function), inputs).graph
    return graph, next(op for op in graph.ops if op.target.startswith(named))


def _evaluations(function: Callable[[Tensor, Tensor], Tensor], named: str, *shape: int) -> float:
    graph, op = _found(function, named, *shape)
    outs = [meta.shape for meta in op.outputs if meta is not None]
    return evaluations(op, [graph.meta(ref).shape for ref in op.refs], outs)


def test_rows_are_looked_up_at_less_an_element_than_single_elements() -> None:
    rows = _evaluations(lambda x, i: x[i], "aten.index.", 64, 128)
    single = _evaluations(lambda x, i: x[:, i], "aten.index.", 64, 128)

    assert rows == pytest.approx(32 * (50 + 0.6 * 128))
    assert single == pytest.approx(64 * 32 * 4.5)


def test_pooling_works_through_each_window() -> None:
    small, large = (
        _evaluations(lambda x, _, k=k: nn.functional.max_pool2d(x, k, 2), "aten.max_pool2d", 2, 4, 18, 18)  # type: ignore[misc]
        for k in (2, (2, 4))
    )

    assert small == 2 * 4 * 9 * 9 * 4 * 4.0
    assert large == 2 * 4 * 9 * 8 * 8 * 4.0


def test_a_power_that_is_a_product_costs_what_it_moves() -> None:
    square, odd = (_evaluations(lambda x, _, p=p: x.abs() ** p, "aten.pow", 8, 8) for p in (2, 1.7))  # type: ignore[misc]

    assert square == 0
    assert odd > 64


def test_what_is_sorted_is_what_is_read() -> None:
    assert _evaluations(lambda x, _: x.topk(2).values, "aten.topk", 8, 64) == 8 * 64 * 4


def test_memory_alone_bounds_lookups_where_the_device_has_no_rate_of_exp() -> None:
    graph, op = _found(lambda x, i: x[:, i], "aten.index.", 64, 128)
    metas = [graph.meta(ref) for ref in op.refs]
    whole = MeshStrategy((Strategy((Replicate(),) * 2, (Replicate(),)),), ((Replicate(),),) * 2, ((Replicate(),),))
    core = catalogued_device("cpu")
    without = replace(core, transcendentals_per_s=0.0)

    bound, free = (operators.seconds(op, metas, [whole], (1,), each)[0] for each in (core, without))

    assert bound > 64 * 32 * 4.5 / core.transcendentals_per_s > free
