"""What GPUs' products and norms want of their operands: the passes give it, and the numbers stay."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar._torch import FakeTensorMode
from autopar.ir.mesh import Axis, Mesh
from autopar.rewrite import rewrite
from autopar.rewrite.aligned import AlignedProducts
from autopar.rewrite.mixed_norms import MixedNorms
from tests.support.decide import decide
from tests.support.remembering import remembered

aten = torch.ops.aten
ALONE = Mesh((Axis("tp", 1, "device"),))


def program(run: Any, *args: torch.Tensor) -> fx.GraphModule:
    """Return the operators that a function runs, each with its fake value."""
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(run, tracing_mode="fake")(*args)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(each) for each in args]
    values: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = fakes[len(values)]
        elif node.op == "call_function":
            given = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            with mode:
                values[node] = node.target(*given[0], **given[1])
        if node in values:
            node.meta["val"] = values[node]
    return gm


def matrix(rows: int, columns: int, *, turned: bool = False) -> torch.Tensor:
    made = torch.randn(columns, rows).t() if turned else torch.randn(rows, columns)
    return made.bfloat16()


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("sizes", [(300, 301, 302), (304, 301, 304), (301, 304, 304), (304, 304, 301), (304, 304, 304)])
def test_operands_are_padded_where_their_rows_are_not_aligned(sizes: tuple[int, int, int], turned: tuple[bool, bool]):
    torch.manual_seed(0)
    m, n, k = sizes
    left, right = matrix(m, k, turned=turned[0]), matrix(k, n, turned=turned[1])
    gm = program(lambda a, b: torch.mm(a, b), left, right)

    changed = AlignedProducts()(gm)
    gm.recompile()

    torch.testing.assert_close(gm(left, right), left @ right)
    innermost = {m if turned[0] else k, k if turned[1] else n, n}
    assert changed == any(each % 8 for each in innermost)
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        for each in (*node.args, node):
            value = each.meta["val"]
            assert max(value.stride()) % 8 == 0


def test_products_that_share_an_operand_share_its_copy_and_what_is_added_is_padded_too():
    torch.manual_seed(0)
    x, w, b = matrix(264, 301), matrix(301, 301), torch.randn(301).bfloat16()
    gm = program(lambda x, w, b: (torch.addmm(b, x, w), torch.mm(x.t(), x)), x, w, b)

    assert AlignedProducts()(gm) == 2
    gm.recompile()

    want = torch.addmm(b, x, w), x.t() @ x
    for mine, its in zip(gm(x, w, b), want, strict=True):
        assert mine.shape == its.shape
        torch.testing.assert_close(mine, its, rtol=2e-2, atol=2e-1)
    copies = [each.args[0] for each in gm.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)]
    assert sorted(map(str, copies)) == ["b_1", "w_1", "x_1"]


@pytest.mark.parametrize(
    "operands",
    [(torch.randn(304, 301), torch.randn(301, 304)), (matrix(64, 301), matrix(301, 304))],
    ids=["float32", "few rows"],
)
def test_other_products_stay_as_they_are(operands: tuple[torch.Tensor, torch.Tensor]):
    gm = program(lambda a, b: torch.mm(a, b), *operands)

    assert AlignedProducts()(gm) == 0


def test_a_result_that_is_flattened_lies_without_gaps():
    left, right = matrix(304, 304), matrix(304, 301)
    gm = program(lambda a, b: torch.mm(a, b).view(8, 38, 301).view(-1), left, right)

    assert AlignedProducts()(gm) == 1
    gm.recompile()

    torch.testing.assert_close(gm(left, right), (left @ right).view(-1))


@pytest.mark.parametrize("viewed", [False, True], ids=["itself", "a view"])
def test_a_result_that_travels_lies_without_gaps(viewed: bool):
    left, right = matrix(304, 304), matrix(304, 301)
    gm = program(lambda a, b: torch.mm(a, b).view(8, 38, 301).transpose(0, 1).neg(), left, right)
    (last,) = gm.graph.find_nodes(op="call_function", target=aten.neg.default)
    (product,) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    with gm.graph.inserting_before(last):
        sent = last.args[0] if viewed else product
        gm.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (sent, "sum", "group"))

    assert AlignedProducts()(gm) == 1

    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce.default)
    copies = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert [each.meta["val"].is_contiguous() for each in copies] == [True]
    assert isinstance(call.args[0], fx.Node)


def test_rows_of_a_product_travel_as_they_are():
    left, right = matrix(301, 304, turned=True), matrix(304, 304)
    gm = program(lambda a, b: torch.mm(a, b).neg(), left, right)
    (last,) = gm.graph.find_nodes(op="call_function", target=aten.neg.default)
    with gm.graph.inserting_before(last):
        gm.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (last.args[0], "sum", "group"))

    assert AlignedProducts()(gm) == 1

    assert not gm.graph.find_nodes(op="call_function", target=aten.clone.default)


class Odd(nn.Module):
    """Norms of 16 bits by weights of 32, and a head of an odd number of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 256)
        self.norm, self.group, self.rms = nn.LayerNorm(256), nn.GroupNorm(4, 16), nn.RMSNorm(256)
        self.head = nn.Linear(256, 301)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.inner(x))
        hidden = self.group(hidden.bfloat16().view(-1, 16, 256)).view(x.shape)
        hidden = self.rms(hidden.bfloat16())
        return nn.functional.cross_entropy(self.head(hidden).float().view(-1, 301), y)


def test_a_program_for_a_gpu_computes_what_the_cpus_does():
    torch.manual_seed(0)
    model = Odd()
    example = (torch.randn(32, 16, 256), torch.randint(301, (512,)))
    with torch.autocast("cpu", torch.bfloat16):
        captured = remembered(model, example)
        want = model(*example)
    decisions = decide(captured.graph, ALONE)
    programs = rewrite(captured.joint, captured.graph, decisions, 0, device="cuda")
    assert programs.backward is not None
    held = dict(model.named_parameters())
    starts = [each for each in captured.placeholders if each.kind != "tangent"]
    given = [example[each.index] if each.kind == "input" else held[each.target] for each in starts]

    for gm in (programs.forward, programs.backward):
        for node in gm.graph.nodes:
            if "device" in node.kwargs:
                node.update_kwarg("device", torch.device("cpu"))
        gm.recompile()

    with torch.no_grad():
        made = programs.forward(*given)
        source = {"input": given, "output": made, "value": made[len(programs.outputs) + len(programs.mutations) :]}
        saved = [source[each.source][each.index] for each in programs.saved]
        gradients = programs.backward(*saved, torch.ones(()))

    torch.testing.assert_close(made[0], want.detach(), rtol=1e-3, atol=1e-3)
    want.backward()
    for mine, its in zip(gradients, model.parameters(), strict=True):
        assert its.grad is not None
        assert float((mine - its.grad).norm() / its.grad.norm()) < 4e-2
    padded = [*programs.forward.graph.nodes, *programs.backward.graph.nodes]
    assert any(node.target is aten.constant_pad_nd.default for node in padded)
    for node in padded:
        if node.target in {
            aten.native_layer_norm.default,
            aten.native_group_norm.default,
            aten._fused_rms_norm.default,
        }:
            kinds = {each.meta["val"].dtype for each in node.all_input_nodes}
            assert len(kinds) == 1


def test_norms_of_one_type_stay_as_they_are():
    x, weight = torch.randn(8, 16), torch.randn(16)
    gm = program(lambda x, w: torch.native_layer_norm(x, [16], w, w, 1e-5)[0], x, weight)

    assert MixedNorms()(gm) == 0
    assert operator.getitem in {node.target for node in gm.graph.nodes}
