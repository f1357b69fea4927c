"""Autocast by a GPU's lists, in captures on the CPU."""

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.capture.autocasting import autocast_as_on_gpu
from autopar.ir.graph import Graph
from autopar.models.zoo.gpt import GptSettings

HALF = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def program(model: nn.Module, *inputs: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Graph:
    with autocast_as_on_gpu(dtype):
        return capture(model, inputs).graph


def types(graph: Graph, target: str) -> list[tuple[str, str]]:
    """Return what operators read and make first, in the order they run."""
    ops = [op for op in graph.ops if op.target.startswith(target)]
    return [(graph.meta(op.refs[0]).dtype, op.outputs[0].dtype) for op in ops if op.outputs[0] is not None]


class Mixed(nn.Module):
    """A norm, a product, a softmax and a sum of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.linear(x))).softmax(dim=-1).pow(2).sum()


@pytest.mark.parametrize("dtype", HALF)
def test_products_run_in_16_bits_and_norms_softmax_and_powers_in_float32(dtype: torch.dtype):
    graph = program(Mixed(), torch.randn(4, 8), dtype=dtype)

    assert set(types(graph, "aten.addmm")) == {(HALF[dtype], HALF[dtype])}
    assert types(graph, "aten.native_layer_norm.") == [("float32", "float32")]
    assert types(graph, "aten.pow")[0] == ("float32", "float32")
    assert types(graph, "aten.sum.default") == [("float32", "float32")]


def test_softmax_reads_float16_as_it_is_and_casts_bfloat16():
    read = {dtype: types(program(Mixed(), torch.randn(4, 8), dtype=dtype), "aten._softmax.")[0] for dtype in HALF}

    assert read == {torch.bfloat16: ("float32", "float32"), torch.float16: ("float16", "float32")}


def test_parameters_and_their_gradients_stay_in_float32_and_each_is_cast_once():
    model = GptSettings(layers=1, hidden=16, heads=2, vocab=32, positions=8).model()
    ids = torch.zeros(2, 8, dtype=torch.int64)
    graph = program(model, ids, ids)

    parameters = {op.name for op in graph.ops if op.kind == "parameter"}
    casts = [op.refs[0].op for op in graph.ops if op.target == "aten._to_copy.default" and op.refs[0].op in parameters]
    assert sorted(casts) == sorted(set(casts))
    assert len(casts) == 9  # weights and biases of four linear layers, and the head's, which is the embedding's too
    assert {graph.meta(each.ref).dtype for each in graph.outputs if each.kind == "gradient" and each.ref} == {"float32"}


def test_the_cpus_own_list_is_as_it_was_afterwards():
    with autocast_as_on_gpu(torch.bfloat16):
        pass

    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = nn.LayerNorm(8)(torch.randn(2, 8, dtype=torch.bfloat16))
    assert made.dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
