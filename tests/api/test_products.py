"""What is priced as products, and at which rate: convolutions as torch counts them, and the rows of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.costs.operators import model_flops, seconds
from autopar.ir.graph import Graph, Op
from autopar.ir.strategy import MeshStrategy
from cost_models.compute import convolution_product, matmul_s
from cost_models.device import DeviceSpec, catalogued_device
from cost_models.weakest import weakest_device
from tests.support.remembering import remembered

LAYERS = {
    "plain": nn.Conv2d(4, 8, 3, padding=1),
    "strided": nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False),
    "grouped": nn.Conv2d(4, 8, 3, padding=1, groups=2),
    "depthwise": nn.Conv2d(4, 4, 5, padding=2, groups=4),
    "transposed": nn.ConvTranspose2d(4, 8, 4, stride=2, padding=1),
    "one dim": nn.Conv1d(4, 6, 5),
}


class Twice(nn.Module):
    """A layer whose input needs a gradient, as another is before it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plane = isinstance(layer, nn.Conv1d)
        self.first, self.layer = (nn.Conv1d if plane else nn.Conv2d)(4, 4, 1), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return self.layer(self.first(x)).square().mean()


def captured(layer: nn.Module) -> tuple[Graph, Twice, torch.Tensor]:
    model = Twice(layer)
    image = torch.randn(2, 4, *([16] if isinstance(layer, nn.Conv1d) else [16, 16]))
    return remembered(model, (image,)).graph, model, image


@pytest.mark.parametrize("name", LAYERS)
def test_convolutions_have_the_flops_that_torch_counts(name: str):
    graph, model, image = captured(LAYERS[name])

    # Each half of a backward takes as much as forward; torch itself counts those of groups as if there were none.
    with FlopCounterMode(display=False) as first:
        between = model.first(image)
    with FlopCounterMode(display=False) as second:
        model.layer(between)

    assert model_flops(graph) == 2 * first.get_total_flops() + 3 * second.get_total_flops()


class Grouped(nn.Module):
    """Rows that each meet the weights of their group: [t, k] @ [e, k, n], by operators of torch's and transformers'."""

    def __init__(self, operator: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32, dtype=dtype)
        self.weight, self.operator = nn.Parameter(torch.randn(4, 32, 48, dtype=dtype)), operator

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return self.operator(self.first(rows), self.weight, ends).square().mean()


@pytest.mark.parametrize("whose", ["torch", "transformers"])
def test_grouped_products_have_the_flops_of_every_row_with_the_weights_of_its_group(whose: str):
    pytest.importorskip("transformers.integrations.moe")
    ours = torch._grouped_mm if whose == "torch" else torch.ops.transformers.grouped_mm_fallback
    dtype = torch.bfloat16 if whose == "torch" else torch.float32
    rows, ends = torch.randn(64, 32, dtype=dtype), torch.tensor([16, 32, 48, 64], dtype=torch.int32)

    graph = remembered(Grouped(ours, dtype), (rows, ends)).graph

    assert model_flops(graph) == 2 * 2 * 64 * 32 * 32 + 3 * 2 * 64 * 32 * 48


def _priced(op: Op, graph: Graph, device: DeviceSpec) -> float:
    alone = MeshStrategy((), tuple(() for _ in op.refs), tuple(() for _ in op.outputs))
    return float(seconds(op, [graph.meta(ref) for ref in op.refs], [alone], (), device)[0])


def test_convolutions_run_at_their_own_rate_where_one_was_measured():
    graph, _, _ = captured(LAYERS["plain"])
    products = catalogued_device("cpu")
    faster = replace(products, convolution_efficiency={"float32": 1.0}, convolution_half=(0, 0, 0))
    found = [op for op in graph.ops if op.target.startswith("aten.convolution")]

    assert len(found) == 4
    for op in found:
        assert _priced(op, graph, faster) < _priced(op, graph, products)


def test_without_a_measured_rate_convolutions_take_what_products_take():
    device = catalogued_device("cpu")
    product = convolution_product(4096, (64, 32, 3, 3), "result")

    assert product == (1, 4096, 64, 288)
    assert float(matmul_s(*product, "float32", device.for_convolutions())) == float(
        matmul_s(*product, "float32", device)
    )


def test_no_convolution_is_faster_on_the_weakest_of_devices_with_and_without_a_rate_of_their_own():
    device = catalogued_device("cpu")
    kinds = [
        device,
        replace(device, convolution_efficiency={"float32": 1.0}, convolution_half=(2, 40, 1)),
        replace(device, convolution_efficiency={"float32": 0.5}, convolution_half=(1, 2, 30)),
    ]
    weakest = weakest_device(kinds)

    for weight in ((8, 8, 3, 3), (64, 256, 1, 1), (512, 512, 3, 3), (96, 1, 7, 7)):
        for of in ("result", "input", "weight"):
            product = convolution_product(1000, weight, of)
            slowest = max(float(matmul_s(*product, "float32", each.for_convolutions())) for each in kinds)
            assert float(matmul_s(*product, "float32", weakest.for_convolutions())) >= slowest * (1 - 1e-12)
