"""What our programs' kernels take beyond one pass on GPUs: there alone, and what was measured where it was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.costs.operators import least_seconds, seconds
from autopar.ir.graph import Graph
from autopar.ir.strategy import MeshStrategy
from cost_models.compute import memory_bound_s
from cost_models.device import DeviceSpec, catalogued_device
from tests.support.remembering import remembered

H200 = catalogued_device("h200")
OTHERS = replace(H200, own_programs=False)
"""The same card with software that was measured on it."""


def price(graph: Graph, target: str, device: DeviceSpec) -> float:
    """Return the seconds of the first operator of a kind, whole on a device."""
    op = next(each for each in graph.ops if each.target.startswith(target))
    metas = [graph.meta(ref) for ref in op.refs]
    whole = MeshStrategy((), ((),) * len(metas), ((),) * len(op.outputs))
    return float(seconds(op, metas, [whole], (), device)[0])


class Runs(nn.Module):
    """What a function computes of a tensor with a gradient, and of others."""

    def __init__(self, run: Callable[..., torch.Tensor], *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.run, self.x = run, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))

    def forward(self, one: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.run(self.x, *others).float().square().sum() * one


def program(run: Callable[..., torch.Tensor], *shape: int, others: Any = (), dtype: Any = torch.float32) -> Graph:
    return remembered(Runs(run, *shape, dtype=dtype), (torch.ones(()), *others)).graph


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


NORM = program(lambda x, w: nn.functional.layer_norm(x, (1024,), w, w), 32, 512, 1024, others=(meta(1024),))
CAST = program(lambda x: x.bfloat16(), 8192, 2048)
SOFTMAX = {
    size: program(lambda x: torch.log_softmax(x, -1), rows, size) for rows, size in ((8192, 32000), (16384, 50257))
}
ROWS = program(lambda x: x.sum(0), 16384, 3072, dtype=torch.bfloat16)
HALF = torch.bfloat16


def attends(*sizes: int, causal: bool, masked: bool = False) -> Graph:
    def run(q: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q + 1, q + 2, mask, is_causal=causal)

    others = (meta(*sizes[:3], sizes[2], dtype=HALF),) if masked else ()
    return program(run, *sizes, dtype=HALF, others=others)


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
MEASURED = {
    "norm": (NORM, "aten.native_layer_norm.default", 54.2),
    "norm, backward": (NORM, "aten.native_layer_norm_backward.default", 132.0),
    "cast": (CAST, "aten._to_copy.default", 38.2),
    "softmax in cache": (SOFTMAX[32000], "aten._log_softmax.default", 797.0),
    "softmax": (SOFTMAX[50257], "aten._log_softmax.default", 3302.7),
    "sum over rows": (ROWS, "aten.sum.", 47.6),
}
"""A program, one of its operators, and the microseconds that its kernels took on an H200 (benchmarks/results)."""


ATTENTIONS = {
    "heads of 64": (attends(32, 16, 512, 64, causal=False), ATTENTION, 93.0 + 313.5),
    "causal": (attends(16, 12, 1024, 64, causal=True), ATTENTION, 82.8 + 272.2),
    "heads of 128": (attends(4, 16, 4096, 128, causal=True), ATTENTION, 483.5 + 1512.7),
    "mask": (attends(16, 12, 512, 64, causal=False, masked=True), ATTENTION, 159.2 + 380.9),
}
"""A program, its attention, and the microseconds that forward and backward took."""


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_priced_near_what_was_measured(name: str):
    graph, target, measured_us = ATTENTIONS[name]
    both = price(graph, f"{target}.default", H200) + price(graph, f"{target}_backward.default", H200)

    assert both * 1e6 == pytest.approx(measured_us, rel=0.25)


@pytest.mark.parametrize("name", MEASURED)
def test_prices_are_near_what_was_measured(name: str):
    graph, target, measured_us = MEASURED[name]

    assert price(graph, target, H200) * 1e6 == pytest.approx(measured_us, rel=0.2)


@pytest.mark.parametrize("name", MEASURED)
def test_software_with_kernels_of_its_own_is_priced_without(name: str):
    graph, target, _ = MEASURED[name]
    core = catalogued_device("cpu")

    assert price(graph, target, OTHERS) < price(graph, target, H200)
    assert price(graph, target, core) == price(graph, target, replace(core, own_programs=False))


def test_elementwise_kernels_on_tensors_of_one_kind_move_what_they_read_and_write():
    graph = program(lambda x, y: x * y, 8192, 2048, others=(meta(8192, 2048),))
    broadcast = program(lambda x, y: x * y, 8192, 2048, others=(meta(2048),))

    assert price(graph, "aten.mul.Tensor", H200) == pytest.approx(float(memory_bound_s(3 * 4 * 2**24, H200)))
    assert price(broadcast, "aten.mul.Tensor", H200) > float(memory_bound_s(2.5 * 4 * 2**24, H200))


def test_convolutions_of_float32_are_computed_in_tf32_where_there_is_any():
    x = meta(8, 64, 128, 128)
    graph = program(lambda w, x: nn.functional.conv2d(x, w), 64, 64, 3, 3, others=(x,))
    without = replace(H200, peak_flops={**H200.peak_flops, "tf32": H200.peak_flops["float32"]})

    assert price(graph, "aten.convolution.default", H200) < price(graph, "aten.convolution.default", without)
    assert least_seconds(graph, [H200]) < least_seconds(graph, [without])


def test_batch_norm_takes_less_of_a_card_whose_memory_is_slower_for_each_multiprocessor() -> None:
    weight = meta(64)
    norm = program(
        lambda x, w: nn.functional.batch_norm(x, None, None, w, w, training=True), 64, 64, 56, 56, others=(weight,)
    )
    l4 = catalogued_device("l4")
    for target in ("aten._native_batch_norm_legit.no_stats", "aten.native_batch_norm_backward"):
        times = price(norm, target, l4) / price(norm, target, H200)
        of_memory = H200.memory_bytes_per_s / l4.memory_bytes_per_s
        assert H200.multiprocessors / l4.multiprocessors < times < 0.5 * of_memory
