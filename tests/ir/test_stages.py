"""Blocks of a program, and the stage of every operator of a cut between them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.capture.recompute import recomputed
from autopar.errors import AutoparError, InfeasibleError, UsageError
from autopar.ir.graph import Graph
from autopar.ir.stages import everywhere, stage_of, units
from tests.support.branching import branching
from tests.support.models import cases
from tests.support.remembering import remembered


class Deep(nn.Module):
    """Stages of layers, as a ResNet has them, and experts in one of them."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(Deep.layer(), Deep.layer()) for _ in range(2))
        self.router = nn.Linear(8, 2)
        self.experts = experts
        self.rows = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))

    @staticmethod
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.experts:
            for stage in self.stages:
                x = stage(x)
            return x.sum()
        for row in self.rows:
            x = row[0](x) + row[1](x)
        return x.sum()


class Functions(nn.Module):
    """Layers as functions of lists of parameters, the last tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(3))
        self.biases = nn.ParameterList(torch.zeros(8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.tanh(x @ weight + bias)
        return (x @ self.weights[0].t()).sum()


def graph_of(name: str, **how: bool) -> Graph:
    model, example = {**cases(), **branching()}[name]
    return remembered(model, example, **how).graph


def paths(graph: Graph) -> list[str]:
    return [unit.path for unit in units(graph)]


def one_each(graph: Graph) -> list[list[str]]:
    return [[path] for path in paths(graph)]


def test_layers_of_module_lists_are_the_blocks_in_the_order_they_run():
    assert paths(graph_of("translator")) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert paths(graph_of("skips")) == ["down.0", "down.1", "down.2", "up.0", "up.1", "up.2"]


def test_without_module_lists_blocks_are_the_modules_that_hold_parameters():
    assert paths(graph_of("tied")) == ["embed", "norm", "qkv", "out", "head"]


def test_parameters_of_lists_are_blocks_where_layers_are_functions_of_them():
    graph = remembered(Functions(), (torch.randn(4, 8),)).graph

    layers = [f"{name}.{at}" for at in range(3) for name in ("weights", "biases")]
    assert paths(graph) == ["embed", *layers]
    found = stage_of(graph, [["embed", *layers[:2]], layers[2:]])
    assert found[next(op.name for op in graph.ops if op.target == "weights.1")] == 1
    assert {found[op.name] for op in graph.ops if op.target == "aten.tanh.default"} == {0, 1}


def test_a_list_of_lists_of_layers_is_cut_between_the_layers_but_not_between_experts():
    rows = remembered(Deep(), (torch.randn(4, 8),)).graph
    experts = remembered(Deep(experts=True), (torch.randn(4, 8),)).graph

    assert paths(rows) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert paths(experts) == ["rows.0", "rows.1"]


def test_every_forward_operator_is_in_one_block_and_what_runs_around_blocks_in_the_one_before():
    graph = graph_of("translator")

    found = units(graph)

    forward = [op.name for op in graph.ops if op.kind == "call" and op.phase == "forward"]
    assert sorted(name for unit in found for name in unit.ops) == sorted(forward)
    modules = [{graph.by_name[name].module for name in unit.ops} for unit in found]
    assert "embed" in modules[0]
    assert "head" in modules[3]


def test_a_tied_parameter_is_in_every_block_that_reads_it():
    found = units(graph_of("tied"))

    assert [unit.path for unit in found if "embed.weight" in unit.parameters] == ["embed", "head"]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", [*cases(), *branching()])
def test_values_flow_up_the_stages_in_forward_and_gradients_down(name: str, again: bool):
    model, example = {**cases(), **branching()}[name]
    # Recomputation writes into what it is given.
    graph = recomputed(capture(model, example), {"*": "full"}).graph if again else remembered(model, example).graph
    shared, behind = everywhere(graph), gradients(graph)

    stages = stage_of(graph, one_each(graph))

    assert set(stages) == set(graph.by_name)
    for op in graph.ops:
        for ref in op.refs:
            if op.kind == "call" and ref.op not in shared and (op.name in behind) == (ref.op in behind):
                up = op.name not in behind
                assert (stages[ref.op] <= stages[op.name]) if up else (stages[ref.op] >= stages[op.name])
    forward = [stages[op.name] for op in graph.ops if op.kind == "call" and op.phase == "forward"]
    assert all(a <= b for a, b in pairwise(forward))


def gradients(graph: Graph) -> set[str]:
    found: set[str] = set()
    for op in graph.ops:
        if op.kind == "tangent" or any(ref.op in found for ref in op.refs):
            found.add(op.name)
    return found


@pytest.mark.parametrize("name", ["mlp", "skips", "translator", "vision"])
def test_operators_with_parameters_of_a_block_run_on_its_stage_in_backward_too(name: str):
    graph = graph_of(name)

    stages = stage_of(graph, one_each(graph))

    for stage, path in enumerate(paths(graph)):
        own = [op for op in graph.ops if op.module == path and op.phase == "backward" and ".mm." in op.target]
        assert {stages[op.name] for op in own} <= {stage}


class OneLine(nn.Module):
    """Two parts that one line of a forward calls: what it ends with is the second's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss of [b, 8] features."""
        found = self.second(torch.cat((x, self.first(x)), 1)).squeeze(1)
        return found.square().mean()


def test_the_backward_of_a_view_runs_where_the_last_of_its_line_does():
    graph = remembered(OneLine(), (torch.randn(4, 8),)).graph

    stages = stage_of(graph, [["first"], ["second.0", "second.2"]])

    products = [op for op in graph.ops if op.target == "aten.mm.default" and op.module.startswith("second")]
    assert len(products) == 4
    assert {stages[op.name] for op in products} == {1}


def test_blocks_of_the_training_program_cut_the_evaluation_program_of_the_model():
    blocks = [["embed", "norm"], ["qkv", "out", "head"]]
    evaluation = graph_of("tied", training=False, with_backward=False)

    stages = stage_of(evaluation, blocks)

    modules = {op.module: stages[op.name] for op in evaluation.ops if op.kind == "call" and op.module}
    assert {"embed": 0, "norm": 0, "qkv": 1, "head": 1}.items() <= modules.items()


class Normed(nn.Module):
    """A head behind the layers whose weight is divided by its largest singular value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x).square().mean()


def test_a_buffer_that_is_only_written_is_on_the_stage_that_writes_it():
    graph = remembered(Normed(), (torch.randn(4, 8),)).graph
    stages = stage_of(graph, one_each(graph))

    updates = {each.name: each.ref.op for each in graph.outputs if each.kind == "mutation" and each.ref is not None}
    assert {stages[name] for name in updates} == {stages[made] for made in updates.values()} == {1}


class Twice(nn.Module):
    """A generator and a critic whose first weight is normed; the critic runs on two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.judges = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = self.makes(x)
        return self.judges(y).mean() - self.judges(made).mean()


def test_no_cut_parts_what_reads_a_buffer_from_what_gives_it_its_new_value():
    graph = remembered(Twice(), (torch.randn(4, 6), torch.randn(4, 8))).graph
    stages = stage_of(graph, one_each(graph))

    updates = {each.name: each.ref.op for each in graph.outputs if each.kind == "mutation" and each.ref is not None}
    assert [unit.path for unit in units(graph)] == ["makes.0", "makes.2", "judges.0"]
    assert {stages[name] for name in updates} == {stages[made] for made in updates.values()} == {2}


def test_one_stage_needs_no_blocks():
    assert set(stage_of(graph_of("mlp"), [()]).values()) == {0}


@pytest.mark.parametrize(
    ("blocks", "kind", "text"),
    [
        ([["encoder.0"], ["decodr.0"]], UsageError, r"no module 'decodr\.0' .*\(did you mean 'decoder\.0'\?\)"),
        ([["decoder.0"], ["encoder.0"]], UsageError, r"'encoder\.0' of stage 1 runs before block 'decoder\.0' "),
        ([["encoder.0"], ["encoder.0"]], UsageError, r"block 'encoder\.0' is named in two places"),
        ([["encoder.0"], []], UsageError, r"stage 1 of 2 has no blocks"),
        ([["encoder.0"]] + [[]] * 4, InfeasibleError, r"5 pipeline stages, and the model has 4 blocks .*--fix pp=4"),
    ],
)  # fmt: skip
def test_blocks_that_make_no_cut_are_refused(blocks, kind: type[AutoparError], text: str):
    with pytest.raises(kind, match=text):
        stage_of(graph_of("translator"), blocks)
