"""Which products compute in a narrower type, and what is cast for them."""

from __future__ import annotations

import torch
from torch import nn

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


def test_products_of_layers_are_narrow_and_those_of_the_head_are_not() -> None:
    graph = remembered(Stack(), (torch.empty(4, 8),)).graph
    found = narrowed_products(graph)
    products = {op.name: op.module for op in graph.ops if op.target == "aten.mm.default"}

    assert all(("head" in products[name]) != (name in found) for name in products)


def test_a_value_is_cast_once_for_all_products_that_read_it() -> None:
    graph = remembered(Stack(), (torch.empty(4, 8),)).graph
    casts = [sum(reads) for name, reads in narrowed_products(graph).items() if graph.by_name[name].phase == "forward"]

    assert casts == [1, 0] * 3
