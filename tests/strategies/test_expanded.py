"""An index that rows share is read once."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import capture
from autopar.costs import operators
from autopar.costs.expanded import index_shares
from autopar.costs.surroundings import ALONE, Surroundings
from autopar.ir.graph import Graph
from autopar.ir.placement import Replicate
from autopar.ir.strategy import MeshStrategy, Strategy
from cost_models.device import catalogued_device


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4096, 1024))

    def forward(self, place: torch.Tensor) -> torch.Tensor:
        rows = place[:, :, None].expand(-1, -1, 1024)
        return torch.zeros_like(self.weight).scatter_add(1, rows, self.weight).sum()


def _graph() -> Graph:
    with torch.device("meta"):
        return capture(Spread(), (torch.zeros(4, 4096, dtype=torch.int64),)).graph


def test_an_expanded_index_is_its_own_size_over_what_it_is_seen_as() -> None:
    graph = _graph()
    op = next(op for op in graph.ops if op.target == "aten.scatter_add.default")

    assert index_shares(graph)[op.name] == (1.0, 1 / 1024, 1.0)


def test_its_bytes_are_not_the_kernels() -> None:
    graph = _graph()
    op = next(op for op in graph.ops if op.target == "aten.scatter_add.default")
    metas = [graph.meta(ref) for ref in op.refs]
    whole = MeshStrategy((Strategy((Replicate(),) * 3, (Replicate(),)),), ((Replicate(),),) * 3, ((Replicate(),),))
    device = catalogued_device("h100-sxm-80gb")
    shares = index_shares(graph)[op.name]

    known = Surroundings(shares=shares), ALONE
    once, each = (operators.seconds(op, metas, [whole], (1,), device, around)[0] for around in known)

    # Buffer, values and result in float32, 4 bytes each; the index would be 8 more.
    assert 0.5 < once / each < 0.7
