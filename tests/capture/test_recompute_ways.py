"""What of a block runs again in backward, by the way of recomputation."""

from __future__ import annotations

import torch

from autopar.capture import capture
from autopar.capture.recompute import SUFFIX, block_of, recomputed_graph
from autopar.ir.graph import Graph
from autopar.models.zoo.gpt import GptSettings


def _graph(*, fused: bool) -> Graph:
    settings = GptSettings(layers=3, hidden=64, heads=8, vocab=128, positions=32, fused_attention=fused)
    with torch.device("meta"):
        model, inputs = settings.model(), settings.inputs(2, 16)
    return capture(model.train(), inputs).graph


def _again(graph: Graph) -> list[str]:
    block = [op for op in graph.ops if op.name.endswith(SUFFIX) and block_of(op) == "blocks.1"]
    return [op.target.removeprefix("aten.").partition(".")[0] for op in block]


def test_selective_recomputation_repeats_the_scores_where_they_are_in_memory() -> None:
    found = _again(recomputed_graph(_graph(fused=False), "selective"))

    assert found.count("bmm") == 1
    assert "_softmax" in found
    assert "addmm" not in found


def test_selective_recomputation_repeats_the_kernel_where_scores_are_inside() -> None:
    found = _again(recomputed_graph(_graph(fused=True), "selective"))

    assert found == ["_scaled_dot_product_flash_attention_for_cpu"]


def test_recomputation_by_operator_keeps_attention_and_every_second_product() -> None:
    found = _again(recomputed_graph(_graph(fused=True), "per_operator"))

    assert "_scaled_dot_product_flash_attention_for_cpu" not in found
    assert found.count("addmm") == 2
    assert "native_layer_norm" in found


def test_cheap_recomputation_repeats_nothing_that_computes() -> None:
    found = _again(recomputed_graph(_graph(fused=True), "cheap"))

    assert "native_layer_norm" in found
    assert "gelu" in found
    assert not {"addmm", "_scaled_dot_product_flash_attention_for_cpu"} & {*found}


def test_inside_of_parts_is_what_no_product_reads() -> None:
    graph = _graph(fused=True)
    found = _again(recomputed_graph(graph, {}, parts=True))
    cheap = _again(recomputed_graph(graph, "cheap"))
    both = _again(recomputed_graph(graph, "selective", parts=True))

    assert set(found) < set(cheap)
    assert not {"gelu", "native_layer_norm"} & {*found}, "products read what these make"
    assert "_scaled_dot_product_flash_attention_for_cpu" in both


def test_all_but_attention_kernels_are_repeated() -> None:
    graph = _graph(fused=True)
    kernel = "_scaled_dot_product_flash_attention_for_cpu"

    found = _again(recomputed_graph(graph, "keep_attention"))

    full = _again(recomputed_graph(graph, "full"))
    assert kernel in full
    assert sorted(found) == sorted(name for name in full if name != kernel)
    plain = _graph(fused=False)
    assert _again(recomputed_graph(plain, "keep_attention")) == _again(recomputed_graph(plain, "full"))


def test_recomputation_to_the_end_repeats_every_call_of_a_block() -> None:
    graph = _graph(fused=True)
    calls = [op for op in graph.ops if op.kind == "call" and op.phase == "forward" and block_of(op) == "blocks.1"]

    again = recomputed_graph(graph, "whole")

    assert len(_again(again)) == len(calls)
    assert len(_again(recomputed_graph(graph, "full"))) < len(calls)
    seen: set[str] = set()
    for op in again.ops:
        assert all(ref.op in seen for ref in op.refs)
        seen.add(op.name)


def test_random_values_that_are_drawn_again_are_not_kept() -> None:
    settings = GptSettings(layers=3, hidden=64, heads=8, vocab=128, positions=32, fused_attention=False, dropout=0.1)
    with torch.device("meta"):
        model, inputs = settings.model(), settings.inputs(2, 16)
    graph = capture(model.train(), inputs).graph

    def kept(redraws: bool) -> set[str]:
        again = recomputed_graph(graph, "whole", redraws=redraws)
        read = {ref.op for op in again.ops if op.phase == "backward" for ref in op.refs}
        drawn = [op for op in again.ops if "dropout" in op.target and op.phase == "forward" and block_of(op)]
        return {op.name for op in drawn} & read

    assert len(kept(redraws=False)) == 9  # scores, attention and MLP of three layers
    assert not kept(redraws=True)


def test_casts_of_parameters_alone_are_repeated() -> None:
    settings = GptSettings(layers=3, hidden=64, heads=8, vocab=128, positions=32)
    with torch.device("meta"):
        model, inputs = settings.model().train(), settings.inputs(2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(model, inputs).graph

    again = recomputed_graph(graph, "casts")

    assert set(_again(again)) == {"_to_copy", "t"}
    weights = {op.refs[0].op for op in again.ops if op.name.endswith(SUFFIX) and "_to_copy" in op.target}
    assert {graph.by_name[name].kind for name in weights} == {"parameter"}
    assert _again(recomputed_graph(_graph(fused=True), "casts")) == []


def test_what_is_in_no_block_runs_again_where_its_own_way_says_so() -> None:
    graph = _graph(fused=True)
    without, with_loss = (recomputed_graph(graph, "selective", outside=way) for way in (None, "cheap"))

    found = [{op.target for op in each.ops if op.name.endswith(SUFFIX)} for each in (without, with_loss)]

    assert "aten._log_softmax.default" not in found[0]
    assert "aten._log_softmax.default" in found[1]
    assert "aten.mm.default" not in found[1]  # the head computes
    assert _again(with_loss) == _again(without)
