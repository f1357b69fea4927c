"""Rows of matrices that do not start at multiples of 16 bytes: seen in programs, priced where software leaves them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.costs.alignment import aligned_elements, read_across
from autopar.costs.operators import seconds
from autopar.costs.surroundings import ALONE, surroundings
from autopar.ir.graph import Graph
from autopar.ir.strategy import MeshStrategy
from cost_models.device import DeviceSpec, catalogued_device
from tests.support.remembering import remembered

H100 = replace(catalogued_device("h100-sxm-80gb"), own_programs=False)
UNPADDED = replace(H100, pads=False)


class Head(nn.Module):
    """A layer before logits, and logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(512, 512, bias=False, dtype=torch.bfloat16, device="meta")
        self.last = nn.Linear(512, classes, bias=False, dtype=torch.bfloat16, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return self.last(self.first(x)).float().square().mean()


def program(classes: int, rows: int = 4096) -> Graph:
    return remembered(Head(classes), (torch.empty(rows, 512, dtype=torch.bfloat16, device="meta"),)).graph


def aligned(graph: Graph) -> list[int]:
    """Return what the products are aligned by: of `first` and `last` forward, of `last` and `first` backward."""
    found = [op for op in graph.ops if op.target == "aten.mm.default"]
    ins = [[graph.meta(ref).shape for ref in op.refs] for op in found]
    return [aligned_elements(op, i, read_across(graph).get(op.name)) for op, i in zip(found, ins, strict=True)]


@pytest.mark.parametrize(("classes", "elements"), [(50304, 8), (50257, 1), (50258, 2), (50260, 4), (50256, 8)])
def test_odd_classes_are_innermost_in_all_three_products_of_their_layer(classes: int, elements: int):
    # Logits, the gradient of their weights and that of their inputs; the layer before has even sizes.
    assert sorted(aligned(program(classes))) == sorted([elements] * 3 + [8] * 2)


def test_an_odd_number_of_rows_is_innermost_nowhere():
    assert set(aligned(program(50304, rows=4097))) == {8}


def test_few_classes_are_not_slow():
    assert set(aligned(program(9))) == {8}


def spent(graph: Graph, device: DeviceSpec, *, alone: bool = False) -> float:
    """Return the seconds of all products, whole on a device."""
    total = 0.0
    for op in graph.ops:
        if op.target == "aten.mm.default":
            metas = [graph.meta(ref) for ref in op.refs]
            whole = MeshStrategy((), ((),) * len(metas), ((),) * len(op.outputs))
            around = ALONE if alone else surroundings(graph, op)
            total += float(seconds(op, metas, [whole], (), device, around)[0])
    return total


def test_software_that_does_not_pad_takes_several_times_as_long_for_odd_classes():
    odd, even = program(50257), program(50304)

    # An H100 has 132 multiprocessors, each of 1 TFLOP/s in such products; those of `first` take a hundredth of all.
    products = 3 * 2 * 4096 * 512 * 50257
    assert spent(odd, UNPADDED) == pytest.approx(products / 132e12, rel=0.03)
    assert spent(odd, UNPADDED) > 3 * spent(even, UNPADDED)
    assert spent(odd, H100) < 1.05 * spent(even, H100)
    assert spent(even, UNPADDED) == spent(even, H100)


def test_without_its_program_a_product_is_taken_to_read_rows():
    odd = program(50257)

    assert 0.6 < spent(odd, UNPADDED, alone=True) / spent(odd, UNPADDED) < 0.8  # all but the weights' gradient


def test_types_of_other_sizes_and_processors_are_not_slower():
    graph = remembered(nn.Sequential(nn.Linear(512, 513), nn.Linear(513, 512)), (torch.empty(1024, 512),)).graph
    cpu = catalogued_device("cpu")

    assert spent(graph, UNPADDED) == spent(graph, H100)
    assert spent(program(50257), replace(cpu, pads=False)) == spent(program(50257), cpu)
