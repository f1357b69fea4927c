"""Which layers are found equal: all that are, none that are not, and their number does not matter."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.capture import capture
from autopar.ir.graph import Graph, Ref
from autopar.ir.stages import units
from autopar.models import zoo
from autopar.models.hf_tiny import tiny

DEPTHS: dict[str, tuple[str, ...]] = {
    "llama": ("num_hidden_layers",),
    "gpt2": ("n_layer",),
    "bert": ("num_hidden_layers",),
    "vit": ("num_hidden_layers",),
    "t5": ("num_layers", "num_decoder_layers"),
    "mixtral": ("num_hidden_layers",),
}


@cache
def _hf(name: str, depth: int) -> Graph:
    model, kwargs = tiny(name, meta=True, **dict.fromkeys(DEPTHS[name], depth))
    return capture(model, kwargs).graph


@cache
def _zoo(name: str, depth: int) -> Graph:
    model, inputs, _ = zoo.build(name, batch=8, seq=32, overrides={"layers": str(depth)})
    return capture(model, inputs).graph


def _representatives(graph: Graph) -> int:
    return len(graph.ops) - len(graph.fold)


QUICK = {"llama", "t5"}
EVERY = [pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,)) for name in DEPTHS]


@pytest.mark.parametrize("name", EVERY)
def test_number_of_representatives_does_not_grow_with_depth(name: str):
    shallow, deep = _hf(name, 3), _hf(name, 4)

    assert len(deep.ops) > len(shallow.ops)
    assert _representatives(deep) == _representatives(shallow)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "mixtral-tiny", "t5-tiny"])
def test_number_of_representatives_of_the_zoo_does_not_grow_with_depth(name: str):
    assert _representatives(_zoo(name, 8)) == _representatives(_zoo(name, 4))


@pytest.mark.parametrize("name", EVERY)
def test_folded_operators_are_the_same_and_read_what_corresponds(name: str):
    graph = _hf(name, 4)

    for folded, standing in graph.fold.items():
        one, other = graph.by_name[folded], graph.by_name[standing]
        assert other.name not in graph.fold
        assert one.kind == other.kind
        assert one.outputs == other.outputs
        assert one.phase == other.phase
        if one.kind == "call":
            assert one.target == other.target
        for mine, theirs in zip(one.refs, other.refs, strict=True):
            assert graph.meta(mine) == graph.meta(theirs)
            assert _corresponds(graph, mine, theirs, one.module, other.module)


def _corresponds(graph: Graph, mine: Ref, theirs: Ref, my_module: str, their_module: str) -> bool:
    """Return whether two values share a decision, or at least one of them comes from outside its reader's layer."""
    same = graph.representative(mine.op) == graph.representative(theirs.op) and mine.index == theirs.index
    inside = _layer(graph, mine) == _layer_of(my_module) and _layer(graph, theirs) == _layer_of(their_module)
    return same or not inside or graph.by_name[mine.op].target == graph.by_name[theirs.op].target


def _layer(graph: Graph, ref: Ref) -> tuple[str, ...]:
    op = graph.by_name[ref.op]
    return _layer_of(op.target.rpartition(".")[0] if op.kind in {"parameter", "buffer"} else op.module)


def _layer_of(path: str) -> tuple[str, ...]:
    parts = path.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return tuple(parts[: last + 1])


def test_parameters_fold_with_their_layers():
    graph = _zoo("llama-tiny", 4)
    fold = {
        graph.by_name[a].target: graph.by_name[b].target
        for a, b in graph.fold.items()
        if graph.by_name[a].kind == "parameter"
    }

    assert fold["layers.3.attention.q.weight"] == "layers.0.attention.q.weight"
    assert fold["layers.1.mlp.down.weight"] == "layers.0.mlp.down.weight"
    assert "embed.weight" not in fold


class Residual(nn.Module):
    def __init__(self, wide: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(wide, hidden)
        self.down = nn.Linear(hidden, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def _stands_for(*layers: nn.Module) -> dict[str, str]:
    graph = capture(Stack(*layers), (torch.zeros(4, 8),)).graph
    return {
        graph.by_name[a].target: graph.by_name[b].target
        for a, b in graph.fold.items()
        if graph.by_name[a].kind == "parameter" and graph.by_name[a].target.endswith("weight")
    }


def test_layer_of_another_width_stays_itself():
    found = _stands_for(Residual(8, 16), Residual(8, 16), Residual(8, 24), Residual(8, 16))

    assert found["layers.1.up.weight"] == "layers.0.up.weight"
    assert found["layers.3.up.weight"] == "layers.0.up.weight"
    assert not {"layers.2.up.weight", "layers.2.down.weight"} & {*found, *found.values()}


def test_frozen_layer_stays_apart_from_trained_ones():
    frozen = Residual(8, 16).requires_grad_(False)

    found = _stands_for(Residual(8, 16), Residual(8, 16), frozen, Residual(8, 16))

    assert not {"layers.2.up.weight", "layers.2.down.weight"} & {*found, *found.values()}
    assert found["layers.3.up.weight"] == "layers.0.up.weight"


class Chained(nn.Module):
    """A layer with nothing around its weight: one may want its columns split, the next its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.linear(x))


def test_chain_without_a_way_around_its_weights_folds_every_second_layer():
    found = _stands_for(*(Chained() for _ in range(6)))

    assert found["layers.4.linear.weight"] == "layers.0.linear.weight"
    assert found["layers.5.linear.weight"] == "layers.1.linear.weight"
    assert all(int(a.split(".")[1]) % 2 == int(b.split(".")[1]) % 2 for a, b in found.items())


class Scaled(Residual):
    def __init__(self) -> None:
        super().__init__(8, 16)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * table


class Tables(nn.Module):
    """Every second layer reads another table, as models that mix local and global attention do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Scaled() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = [torch.ones(8).sin(), torch.ones(8).cos()]
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = layer(x, tables[i % 2])
        return x.sum()


def test_layers_that_read_different_tables_stay_apart():
    graph = capture(Tables(), (torch.zeros(4, 8),)).graph
    reads = {op.name: op.module for op in graph.ops if op.target == "aten.mul.Tensor" and op.phase == "forward"}

    pairs = {(int(reads[a].split(".")[1]), int(reads[b].split(".")[1])) for a, b in graph.fold.items() if a in reads}

    assert pairs
    assert all(folded % 2 == standing % 2 for folded, standing in pairs)


class Normed(nn.Module):
    """Equal layers whose weights are made by parametrizations that change their buffers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = functional.relu(layer(x))
        return x.square().mean()


def test_layers_that_are_asked_for_by_getattr_have_their_paths():
    graph = capture(Normed(), (torch.randn(4, 8),)).graph

    products = [op.module for op in graph.ops if op.target == "aten.addmm.default" and op.phase == "forward"]
    assert products == [f"layers.{i}" for i in range(4)]
    normed = {op.module for op in graph.ops if op.target == "aten.vdot.default" and op.phase == "forward"}
    assert normed == {f"layers.{i}.parametrizations.weight.0" for i in range(4)}
    assert [unit.path for unit in units(graph)] == [f"layers.{i}" for i in range(4)]
