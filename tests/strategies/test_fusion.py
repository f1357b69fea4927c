"""Which values stay inside one kernel."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture.recompute import SUFFIX, recomputed_graph
from autopar.costs.fusion import fused_traffic
from autopar.ir.graph import Graph
from tests.support.remembering import remembered


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return self.down(torch.tanh(y * 2.0).relu() + 1.0).sum()


def _graph() -> Graph:
    return remembered(Net(), (torch.empty(4, 8),)).graph


def test_a_run_reads_once_what_a_product_made_and_writes_once_what_the_next_reads() -> None:
    graph = _graph()
    found = fused_traffic(graph)
    run = [op for op in graph.ops if op.phase == "forward" and op.name in found and op.target != "aten.sum.default"]

    assert [op.target for op in run] == [
        "aten.mul.Tensor", "aten.tanh.default", "aten.relu.default", "aten.add.Tensor",
    ]  # fmt: skip
    assert [found[op.name].run.reads for op in run] == [(False,), (True,), (True,), (True,)]
    assert found[run[0].name].run.writes == (True,)
    assert found[run[-1].name].run.writes == (False,)


def test_what_backward_reads_is_written() -> None:
    graph = _graph()
    found = fused_traffic(graph)

    read_late = {ref.op for op in graph.ops if op.phase == "backward" for ref in op.refs}
    assert not any(
        any(found[name].run.writes) for name in read_late if name in found and graph.by_name[name].phase == "forward"
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x + 1.0)).sum()


def test_what_a_run_does_for_one_module_is_a_kernel_that_reads_what_others_made() -> None:
    graph = remembered(Block(), (torch.empty(4, 8),)).graph
    found = fused_traffic(graph)
    norm = [op for op in graph.ops if op.phase == "forward" and op.module == "norm" and op.name in found]
    of_run, of_part = (
        sum(not each for op in norm for each in getattr(found[op.name], kernel).reads) for kernel in ("run", "part")
    )

    assert of_part == of_run + 1  # the sum, which the norm reads from memory


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Step(), Step()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sin(self.up(x))) * 2.0


def test_what_backward_computes_again_belongs_to_the_run_that_reads_it() -> None:
    graph = recomputed_graph(remembered(Wide(), (torch.empty(4, 8),)).graph, "cheap")
    found = fused_traffic(graph)

    again = [op for op in graph.ops if op.name.endswith(SUFFIX) and "layers.1" in op.module and op.name in found]
    assert [op.target for op in again] == ["aten.sin.default", "aten.tanh.default"]
    assert [found[op.name].run.writes for op in again] == [(True,)] * 2
