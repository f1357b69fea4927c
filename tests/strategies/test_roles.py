"""What an axis offers by its role: strategies of the operators' own, and which of them along experts and tokens."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.ir.graph import Graph
from autopar.ir.placement import Partial, Replicate, Shard
from autopar.ir.strategy import MeshStrategy
from autopar.models.zoo.llama import LlamaSettings
from autopar.strategies import axis_strategies
from autopar.strategies.compose import AxisSpec, Role, compose
from autopar.strategies.experts import experts
from autopar.strategies.regions import parameters_read, region
from tests.support.remembering import remembered
from tests.support.routing import routing

SIZE = 2


@cache
def program(name: str) -> Graph:
    if name == "grouped":
        return remembered(*routing()["experts"]).graph
    settings = LlamaSettings(2, 16, 2, 2, 32, vocab=32, sequence=8, experts=4 if name == "batched" else 0)
    with torch.device("meta"):
        return remembered(settings.model(), settings.inputs(4, 8)).graph


def offered(name: str, role: Role, *, shard_parameters: bool = True) -> dict[str, tuple[MeshStrategy, ...]]:
    return dict(compose(program(name), [AxisSpec(SIZE, role, shard_parameters)], axis_strategies).of)


@pytest.mark.parametrize("role", ["batch", "expert", "sequence"])
@pytest.mark.parametrize("name", ["dense", "batched", "grouped"])
def test_an_axis_offers_what_a_free_one_does_or_less(name: str, role: Role):
    free, mine = offered(name, "free"), offered(name, role)

    for operator, strategies in mine.items():
        assert strategies
        if len(free[operator]) > 1:  # small tables of inputs are whole on a free axis, parts on one that splits these
            assert set(strategies) <= set(free[operator])


@pytest.mark.parametrize("name", ["batched", "grouped"])
def test_an_axis_of_experts_is_one_of_the_batch_but_around_them(name: str):
    known = experts(program(name))
    batch, mine = offered(name, "batch"), offered(name, "expert")

    inside = known.around | known.parameters
    outside = mine.keys() - inside
    assert {op.name for op in program(name).ops if op.target == "aten.mm.default"} & outside
    for operator in outside:
        assert mine[operator] == batch[operator]
    for operator in known.around - known.products.keys() - known.gradients:
        if name == "batched":  # a batch axis sorts its own rows and goes on with these; experts' has all of them there
            assert batch[operator][0] in mine[operator]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["batched", "grouped"])
def test_experts_are_in_parts_wherever_they_are_used(name: str, whole: bool):
    graph = program(name)
    known = experts(graph)

    mine = offered(name, "expert", shard_parameters=not whole)

    order = [op.target for op in graph.ops if op.target in known.counts]
    assert list(known.counts) == order
    assert set(known.counts.values()) == {4}
    for operator in known.parameters & mine.keys():
        assert {each.outputs[0] for each in mine[operator]} == {(Shard(0),)}
    for operator, slots in known.products.items():
        if operator in mine:
            assert {each.inputs[slot] for each in mine[operator] for slot in slots} == {(Shard(0),)}
    for operator in known.gradients & mine.keys():
        assert {each.outputs[-1] for each in mine[operator]} <= {(Shard(0),), (Partial(),)}
    others = {op.name for op in graph.ops if op.kind == "parameter"} - known.parameters
    for operator in others & mine.keys():
        rests = {each.outputs[0] for each in mine[operator]}
        assert rests == {(Replicate(),)} if whole else (Replicate(),) in rests


def test_a_program_without_experts_has_none():
    known = experts(program("dense"))

    assert not known.counts
    assert not known.around
    assert offered("dense", "expert") == offered("dense", "batch")


def test_along_tokens_products_use_whole_matrices_and_gradients_are_terms():
    graph, mine = program("dense"), offered("dense", "sequence")

    for op in graph.ops:
        if op.target == "aten.mm.default" and op.name in mine:
            (strategy,) = mine[op.name][:1]
            matrices = parameters_read(graph, op)
            assert all(strategy.inputs[slot] == (Replicate(),) for slot in matrices)
            first = strategy.inputs[1 - matrices[0]] if matrices else strategy.outputs[0]
            assert first in {(Shard(0, 4),), (Partial(),)}


def test_attention_is_offered_heads_and_its_surroundings_heads_and_tokens():
    graph, mine = program("dense"), offered("dense", "sequence")
    attention = [op for op in graph.ops if "_dot_product_" in op.target and op.name in mine]

    assert len(attention) == 2
    for op in attention:
        assert {each.inputs[0] for each in mine[op.name]} == {(Replicate(),), (Shard(1),)}
        for ref in op.refs[:3]:
            made = {each.outputs[ref.index] for each in mine[graph.representative(ref.op)]}
            assert {(Shard(1),), (Shard(2),)} <= made


def test_a_region_ends_at_parameters_and_residual_sums():
    graph = program("dense")
    attention = {op.name for op in graph.ops if "_dot_product_" in op.target and op.phase == "forward"}

    found = region(graph, attention)

    assert attention & found
    for name in found:
        op = graph.by_name[name]
        assert not parameters_read(graph, op)
        assert not (op.target == "aten.add.Tensor" and op.module in {"layers.0", "layers.1"})
