"""Fused attention computes with the sizes of heads that its kernels are built for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.costs.operators import flops, seconds
from autopar.ir.strategy import MeshStrategy
from cost_models.device import DeviceSpec, catalogued_device
from cost_models.frameworks import stack_of
from tests.support.remembering import remembered

A100 = catalogued_device("a100-sxm-80gb")
FIRST = stack_of("pytorch", compiled=False).on(A100, 2023)
LATER = stack_of("pytorch", compiled=False).on(A100, 2025)
CUDNN = stack_of("jax", compiled=True).on(catalogued_device("h100-sxm-80gb"), 2025)


class Heads(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True).float().sum()


def attention(size: int, device: DeviceSpec) -> tuple[float, float]:
    """Return the seconds and the model's operations of attention forward and backward with heads of a size."""
    with torch.device("meta"):
        graph = remembered(Heads(size), (torch.empty(2, 4, 4096, size, dtype=torch.bfloat16),)).graph
    spent = counted = 0.0
    for op in graph.ops:
        if op.target.startswith("aten._scaled_dot_product"):
            metas = [graph.meta(ref) for ref in op.refs]
            spent += float(
                seconds(op, metas, [MeshStrategy((), ((),) * len(metas), ((),) * len(op.outputs))], (), device)[0]
            )
            counted += flops(op, metas)
    return spent, counted


@pytest.mark.parametrize(
    ("size", "device", "padded"),
    [(80, FIRST, 128), (80, LATER, 96), (96, FIRST, 128), (112, LATER, 128), (72, LATER, 96)],
)
def test_heads_take_what_those_take_that_a_kernel_is_built_for(size: int, device: DeviceSpec, padded: int):
    (took, counted), (like, of_like) = attention(size, device), attention(padded, device)

    assert took == pytest.approx(like, rel=0.01)
    assert counted == pytest.approx(of_like * size / padded), "the model's operations are not padded"


def test_heads_that_no_kernel_is_built_for_are_as_they_are():
    assert A100.padded_head(512) == 512
    assert CUDNN.padded_head(80) == 80
