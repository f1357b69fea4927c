"""Until when the memory of a value is there, on plans whose layouts are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from autopar.capture import capture
from autopar.clusters import ClusterSpec
from autopar.costs.held import needed_until
from autopar.costs.links import Links
from autopar.ir.graph import Graph
from autopar.ir.placement import Layout, Partial, Replicate, Shard

if TYPE_CHECKING:
    from autopar.costs.outcome import Outcome

ROWS, GROUPS, WIDTH = 8, 4, 16
CONTEXT = 0
"""The axis along which a rank keeps its own part of what it gathers."""

TERMS: Layout = (Shard(0), Partial("sum"))
OWN: Layout = (Shard(0), Shard(1))
GATHERED: Layout = (Replicate(), Shard(1))


class Halves(nn.Module):
    """Two halves of one product, multiplied: backward reads each again."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.both(x).split(WIDTH, -1)
        return (a * b).sum()


@dataclass(frozen=True)
class Given:
    """What an operator reads and makes."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True)
class Decided:
    """Layouts alone of an outcome: whoever computes with a half gathers it along the context axis."""

    graph: Graph
    links: Links
    product: Layout
    """In which the product is made; its halves lie as `OWN`."""

    def strategy(self, rep: str) -> Given:
        op = self.graph.by_name[rep]
        of_product = op.phase == "forward" and op.target in {"aten.mm.default", "aten._unsafe_view.default"}
        made = self.product if of_product else OWN
        read = GATHERED if op.target == "aten.mul.Tensor" else made
        return Given((read,) * len(op.refs), (made,) * len(op.outputs))

    def layout(self, rep: str, index: int = 0) -> Layout:
        return self.strategy(rep).outputs[index]

    def product_until(self) -> str:
        """Return the operator up to which the product's own memory is there."""
        until = needed_until(cast("Outcome", self))
        return self.graph.ops[until["mm", 0]].target


def decided(product: Layout) -> Decided:
    graph = capture(Halves(), (torch.randn(ROWS, GROUPS, WIDTH),)).graph
    return Decided(graph, Links(ClusterSpec.parse("cpu:4"), (2, 2), 0, again_axes=frozenset({CONTEXT})), product)


def test_what_is_gathered_again_is_there_until_then():
    made = decided(OWN)

    assert made.product_until() == "aten.mul.Tensor"
    assert made.graph.ops[needed_until(cast("Outcome", made))["mm", 0]].phase == "backward"


def test_terms_end_with_their_scatter_though_parts_of_the_sum_are_gathered_again():
    assert decided(TERMS).product_until() == "aten.split.Tensor"
