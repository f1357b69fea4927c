"""Deep programs of equal layers: what an axis admits is found on a few, and what the first come to is looked up."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

from autopar.api import program_of
from autopar.capture.recompute import recomputed_graph
from autopar.ir.graph import Graph
from autopar.ir.thinned import thinned
from autopar.models import resolve
from autopar.strategies import axis_strategies
from autopar.strategies import compose as composing
from autopar.strategies.compose import AxisChoices, AxisSpec, Role, compose
from autopar.strategies.in_time import _Follower, followed
from tests.support.remembering import remembered

_FEW = {"hidden": "64", "heads": "4", "vocab": "256"}
MODELS = {
    "zoo:gpt2": _FEW,
    "zoo:llama3-8b": _FEW | {"kv_heads": "2", "intermediate": "128"},
    "zoo:mixtral-8x7b": _FEW | {"kv_heads": "2", "intermediate": "128"},
    "hf:qwen3_moe": {
        "hidden_size": "64", "num_attention_heads": "4", "num_key_value_heads": "2",
        "moe_intermediate_size": "32", "intermediate_size": "64", "num_experts": "8", "vocab_size": "256",
    },
    "zoo:t5-large": {"hidden": "64", "heads": "4", "head_size": "16", "intermediate": "128", "vocab": "256"},
}  # fmt: skip
LAYERS = {"zoo": "layers", "hf": "num_hidden_layers"}
ROLES: tuple[Role, ...] = ("time", "batch", "free", "tensor", "expert", "sequence")


@cache
def program(name: str, depth: int) -> Graph:
    settings = MODELS[name] | {LAYERS[name.partition(":")[0]]: str(depth)}
    found = resolve(name, batch=8, seq=16, overrides=settings)
    return program_of(found.model, found.shallow, found.example_inputs, "bf16")


@pytest.mark.parametrize("way", ["none", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_an_axis_admits_of_a_few_layers_what_it_admits_of_all(name: str, way: str, monkeypatch: pytest.MonkeyPatch):
    graph = program(name, 8) if way == "none" else recomputed_graph(program(name, 8))
    short = thinned(graph)
    axes = [AxisSpec(2, role) for role in ROLES]

    found = [compose(graph, [axis], axis_strategies).of for axis in axes]
    monkeypatch.setattr(composing, "thinned", lambda graph: graph)
    whole = [compose(graph, [axis], axis_strategies).of for axis in axes]

    assert len(short.ops) < len(graph.ops)
    assert [op.name for op in short.representatives] == [op.name for op in graph.representatives]
    assert found == whole


@pytest.mark.parametrize("depth", [7, 12])
def test_the_short_program_has_as_many_operators_at_any_depth(depth: int):
    assert len(thinned(program("zoo:llama3-8b", depth)).ops) == len(thinned(program("zoo:llama3-8b", 9)).ops)


class Collecting(nn.Module):
    """Layers whose results are all read behind the last of them, as balances of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for layer in self.layers:
            x = torch.relu(layer(x))
            found.append(x)
        return torch.stack(found).square().mean()


def test_a_program_stays_whole_where_something_reads_all_layers():
    graph = remembered(Collecting(), (torch.ones(4, 8),)).graph

    assert thinned(graph) is graph


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", ["zoo:mixtral-8x7b", "hf:qwen3_moe"])
def test_what_the_first_layers_come_to_is_what_each_comes_to(name: str, count: int, monkeypatch: pytest.MonkeyPatch):
    graph = program(name, 8)
    found = compose(graph, [AxisSpec(count)], axis_strategies).of
    options = {rep: tuple(each.axes[0] for each in strategies) for rep, strategies in found.items()}

    called: list[str] = []
    call = _Follower._call
    monkeypatch.setattr(_Follower, "_call", lambda self, op: (called.append(op.name), call(self, op)))
    known = followed(graph, count, options)
    times = Counter(graph.representative(name) for name in called)
    monkeypatch.setattr(_Follower, "_remember", lambda *_: None)
    anew = followed(graph, count, options)

    # Sorts are told apart by their names, and blank values settled by who reads them.
    again = {graph.by_name[rep].target for rep, each in times.items() if each > 3}
    assert all(any(word in target for word in ("sort", "empty", "new_zeros")) for target in again)
    assert any(fact.order for fact in anew.facts.values())
    assert known.strategies == anew.strategies
    assert known.facts == anew.facts


def test_strategies_of_equal_calls_are_enumerated_once_for_all_programs(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def counted(op, *rest):
        asked.append(op.name)
        return axis_strategies(op, *rest)

    known = AxisChoices()
    graph = program("zoo:gpt2", 8)
    compose(graph, [AxisSpec(2)], counted, known)
    once = len(asked)
    compose(recomputed_graph(graph), [AxisSpec(2)], counted, known)

    assert len(asked) < 1.2 * once
