"""Precision policies, and autocast by a GPU's lists, in captures on the CPU."""

import pytest
import torch
from torch import nn
from transformers.integrations import moe as _registers_grouped_mm_fallback  # noqa: F401

from autopar.capture import capture
from autopar.capture.autocasting import autocast_as_on_gpu, policy
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


class Experts(nn.Module):
    """Four experts; a token's rows come sorted by them. `native`: multiplied by torch, or else by transformers."""

    def __init__(self, native: bool = True) -> None:
        super().__init__()
        self.product = torch._grouped_mm if native else torch.ops.transformers.grouped_mm_fallback
        self.weight = nn.Parameter(torch.randn(4, 16, 8))
        self.register_buffer("ends", torch.tensor([2, 5, 6, 8], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.ends).float().square().sum()


@pytest.mark.parametrize("native", [True, False])
def test_a_policy_multiplies_by_experts_in_16_bits_with_parameters_and_their_gradients_in_float32(native: bool):
    model, rows = Experts(native), torch.randn(8, 16)
    with policy("bf16"):
        graph = capture(model, (rows,)).graph

    products = [op for op in graph.ops if "grouped_mm" in op.target]
    assert len(products) == 2  # forward, and the weight's gradient: nothing asks for that of rows
    assert {graph.meta(ref).dtype for op in products for ref in op.refs[:2]} == {"bfloat16"}
    assert {op.outputs[0].dtype for op in graph.ops if op.kind == "parameter"} == {"float32"}
    gradients = [graph.meta(each.ref).dtype for each in graph.outputs if each.kind == "gradient" and each.ref]
    assert gradients == ["float32"]


def test_experts_of_a_policy_give_the_products_of_their_rows_and_torch_is_as_before_after_it():
    model, rows = Experts(), torch.randn(8, 16)
    parts = rows.bfloat16().split([2, 3, 1, 2])
    alone = torch.cat([part @ weight for part, weight in zip(parts, model.weight.bfloat16(), strict=True)])
    with policy("bf16"):
        made = torch._grouped_mm(rows, model.weight, offs=model.ends)
    after = torch._grouped_mm(rows, model.weight, offs=model.ends)

    assert torch.equal(made, alone)
    assert (after.dtype, made.dtype) == (torch.float32, torch.bfloat16)
    made.float().sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32
