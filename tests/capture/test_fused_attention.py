"""Attention that drops scores, or whose values are of another size than its keys: one kernel, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.capture.autocasting import policy
from autopar.capture.recompute import recomputed_graph
from autopar.ir.graph import Graph
from tests.capture.program import run

BATCH, HEADS, SEQ = 2, 4, 6


class Latent(nn.Module):
    """Attention as those have it that make keys and values of one latent vector."""

    def __init__(
        self, of_key: int, of_value: int, heads_of_keys: int = HEADS, trained: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.query = nn.Linear(8, HEADS * of_key)
        self.key, self.value = nn.Linear(8, heads_of_keys * of_key), nn.Linear(8, heads_of_keys * of_value)
        self.trained, self.bias = trained, nn.Parameter(torch.zeros(SEQ, SEQ), requires_grad=trained)
        self.of_key, self.of_value, self.options = of_key, of_value, options

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        sizes = (self.of_key, self.of_key, self.of_value)
        made = zip((self.query, self.key, self.value), sizes, strict=True)
        q, k, v = (project(x).unflatten(-1, (-1, size)).transpose(1, 2) for project, size in made)
        found = functional.scaled_dot_product_attention(q, k, v, self.bias if self.trained else mask, **self.options)
        return (found * torch.arange(self.of_value)).sum()


def kernels(graph: Graph) -> list[str]:
    """Return what attention is computed by."""
    return [op.target for op in graph.ops if "softmax" in op.target or "scaled_dot_product" in op.target]


@pytest.mark.parametrize(
    ("sizes", "options", "masked"),
    [
        ((6, 4), {"is_causal": True}, False),
        ((4, 6), {"is_causal": True}, False),
        ((6, 4), {"scale": 0.5}, False),
        ((6, 4), {}, True),
        ((6, 4), {"enable_gqa": True, "is_causal": True}, False),
    ],
)
def test_is_one_kernel_and_computes_the_same(sizes: tuple[int, int], options: dict[str, Any], masked: bool) -> None:
    torch.manual_seed(0)
    model = Latent(*sizes, heads_of_keys=2 if "enable_gqa" in options else HEADS, **options).double()
    x = torch.randn(BATCH, SEQ, 8, dtype=torch.float64)
    given = (x, torch.ones(SEQ, SEQ, dtype=torch.bool).tril()) if masked else (x,)
    captured = capture(model, given)
    assert kernels(captured.graph) == [
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    ]
    found = run(captured, model, given)
    expected = model(*given)
    expected.backward()
    torch.testing.assert_close(found.result, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients.get(name), parameter.grad)


IN_BLOCKS = [
    "autopar_ops._scaled_dot_product_block_attention.default",
    "autopar_ops._scaled_dot_product_block_attention_backward.default",
]


@pytest.mark.parametrize("sizes", [(4, 4), (6, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_drops_scores_in_one_kernel(sizes: tuple[int, int], masked: bool) -> None:
    torch.manual_seed(0)
    few = 1e-9  # of so few that none is dropped: numbers of the model without dropout
    model = Latent(*sizes, dropout_p=few, is_causal=not masked).double()
    x = torch.randn(BATCH, SEQ, 8, dtype=torch.float64)
    given = (x, torch.ones(SEQ, SEQ, dtype=torch.bool).tril()) if masked else (x,)
    captured = capture(model, given)
    assert kernels(captured.graph) == IN_BLOCKS
    found = run(captured, model, given)
    model.options["dropout_p"] = 0.0
    expected = model(*given)
    expected.backward()
    torch.testing.assert_close(found.result, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients.get(name), parameter.grad)


def test_torch_s_own_layers_drop_scores_in_one_kernel() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(SEQ)
    x = torch.randn(BATCH, SEQ, 16)
    assert kernels(capture(layer, (x, mask)).graph) == IN_BLOCKS


def test_a_constant_causal_mask_of_one_that_drops_is_told_by_the_argument() -> None:
    class Causal(Latent):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, torch.ones(SEQ, SEQ).tril().log())

    graph = capture(Causal(4, 4, dropout_p=0.5), (torch.randn(BATCH, SEQ, 8),)).graph
    (forward,) = (op for op in graph.ops if op.target == IN_BLOCKS[0])
    assert forward.args[4] is True
    assert len(forward.refs) == 3


def test_under_autocast_it_computes_in_16_bits() -> None:
    with policy("bf16"):
        graph = capture(Latent(4, 4, dropout_p=0.5), (torch.randn(BATCH, SEQ, 8),)).graph
    (forward,) = (op for op in graph.ops if op.target == IN_BLOCKS[0])
    assert {graph.meta(ref).dtype for ref in forward.refs} == {"bfloat16"}


def test_recomputation_keeps_what_was_drawn() -> None:
    graph = capture(Latent(4, 4, dropout_p=0.5), (torch.randn(BATCH, SEQ, 8),)).graph
    again = recomputed_graph(graph, "full")
    assert sum(op.target == IN_BLOCKS[0] for op in again.ops) == 1


@pytest.mark.parametrize("sizes", [(4, 4), (6, 4)])
@pytest.mark.parametrize("options", [{}, {"enable_gqa": True, "heads_of_keys": 2}])
def test_trains_a_mask_in_one_kernel(sizes: tuple[int, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Latent(*sizes, trained=True, **options).double()
    with torch.no_grad():
        model.bias.normal_()
    x = torch.randn(BATCH, SEQ, 8, dtype=torch.float64)
    captured = capture(model, (x,))
    assert kernels(captured.graph) == IN_BLOCKS
    found = run(captured, model, (x,))
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(found.result, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients.get(name), parameter.grad)


@pytest.mark.parametrize("options", [{"dropout_p": 1.0}])
def test_stays_where_no_fused_kernel_is_to_be_had(options: dict[str, Any]) -> None:
    captured = capture(Latent(6, 4, **options), (torch.randn(BATCH, SEQ, 8),))
    assert not any("scaled_dot_product" in each for each in kernels(captured.graph))
    assert not any("pad" in op.target for op in captured.graph.ops)
