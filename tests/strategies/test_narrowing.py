"""Which products compute in a narrower type, and what is cast for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from autopar.costs.liveness import lives
from autopar.costs.narrowing import narrowed_products
from tests.support.remembering import remembered


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.left(x)) * torch.sigmoid(self.right(x))


class Stack(nn.Module):
    """Equal layers, each of two products of one input, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


class Read(nn.Module):
    """A product of what tanh makes, whose backward reads that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x))).sum()


def test_products_of_layers_are_narrow_and_those_of_the_head_are_not() -> None:
    graph = remembered(Stack(), (torch.empty(4, 8),)).graph
    found = narrowed_products(graph)
    products = {op.name: op.module for op in graph.ops if op.target == "aten.mm.default"}

    assert all(("head" in products[name]) != (name in found) for name in products)


def test_a_value_is_cast_once_for_all_products_that_read_it() -> None:
    graph = remembered(Stack(), (torch.empty(4, 8),)).graph
    casts = [sum(reads) for name, reads in narrowed_products(graph).items() if graph.by_name[name].phase == "forward"]

    assert casts == [1, 0] * 3


def test_what_linear_layers_cast_is_kept_in_their_stead_and_half_as_large() -> None:
    plain = remembered(Stack().to(torch.bfloat16), (torch.empty(4, 8, dtype=torch.bfloat16),)).graph
    graph = replace(plain, keeps_narrow=True)
    loss = max(at for at, op in enumerate(graph.ops) if op.phase == "forward")
    # A layer's output is read by the two products of the next layer, and by nothing else that runs in backward.
    between = [(op.name, 0) for op in graph.ops if op.target == "aten.mul.Tensor" and op.phase == "forward"][:-1]
    waiting = [[each for each in lives(one) if each.first <= loss < each.last] for one in (plain, graph)]
    shares = [{(each.op, each.index): each.share for each in some} for some in waiting]

    assert len(between) == 2
    assert [shares[0][value] for value in between] == [1.0, 1.0]
    assert [shares[1][value] for value in between] == [0.5, 0.5]


def test_a_value_that_others_read_in_backward_stays_beside_its_cast() -> None:
    graph = remembered(Read().to(torch.bfloat16), (torch.empty(4, 8, dtype=torch.bfloat16),)).graph
    loss = max(at for at, op in enumerate(graph.ops) if op.phase == "forward")
    made = next(op.name for op in graph.ops if op.target == "aten.tanh.default")
    waiting = [each for each in lives(replace(graph, keeps_narrow=True)) if each.first <= loss < each.last]

    assert sorted(each.share for each in waiting if each.op == made) == [0.5, 1.0]
