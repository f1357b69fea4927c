"""Which values stay inside one kernel."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import capture
from autopar.costs.fusion import fused_traffic
from autopar.ir.graph import Graph


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return self.down(torch.tanh(y * 2.0).relu() + 1.0).sum()


def _graph() -> Graph:
    return capture(Net(), (torch.empty(4, 8),)).graph


def test_a_run_reads_once_what_a_product_made_and_writes_once_what_the_next_reads() -> None:
    graph = _graph()
    found = fused_traffic(graph)
    run = [op for op in graph.ops if op.phase == "forward" and op.name in found and op.target != "aten.sum.default"]

    assert [op.target for op in run] == [
        "aten.mul.Tensor", "aten.tanh.default", "aten.relu.default", "aten.add.Tensor",
    ]  # fmt: skip
    assert [found[op.name].reads for op in run] == [(False,), (True,), (True,), (True,)]
    assert found[run[0].name].writes == (True,)
    assert found[run[-1].name].writes == (False,)


def test_what_backward_reads_is_written() -> None:
    graph = _graph()
    found = fused_traffic(graph)

    read_late = {ref.op for op in graph.ops if op.phase == "backward" for ref in op.refs}
    assert not any(
        any(found[name].writes) for name in read_late if name in found and graph.by_name[name].phase == "forward"
    )
