"""Programs of pipeline stages, all stages and ranks in one process, against the whole program."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.api import plan_captured
from autopar.capture import capture
from autopar.capture.recompute import recomputed
from autopar.errors import InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Gather, Reduce
from autopar.ir.roles import is_view
from autopar.ir.stages import stage_of, units
from autopar.ir.weight_gradients import weight_gradients
from autopar.options import PlanOptions
from autopar.progress import Silent
from autopar.rewrite.staged import Item
from cost_models.cluster import ClusterSpec
from tests.support.branching import Again, Translator, branching
from tests.support.decide import decide, drawn, mesh_of
from tests.support.models import cases
from tests.support.staged import Pipeline, require_equal, run_stages
from tests.support.whole import Whole

BLOCKS = {
    "mlp": 2, "plain": 3, "twin": 3, "vision": 3, "tied": 5, "skips": 6, "translator": 4, "counting": 3, "repeated": 4,
    "strided": 4,
}  # fmt: skip
"""How many blocks each model has."""


@pytest.fixture(scope="module")
def wholes() -> dict[str, tuple[Whole, list[torch.Tensor | None]]]:
    models = {**cases(), **branching()}
    found = {name: Whole.of(*models[name]) for name in BLOCKS}
    return {name: (whole, whole.run()) for name, whole in found.items()}


def evenly(whole: Whole, stages: int) -> list[list[str]]:
    """Return the blocks of at most so many stages, about as many for each."""
    paths = [unit.path for unit in units(whole.captured.graph)]
    stages = min(stages, len(paths))
    return [paths[len(paths) * i // stages : len(paths) * (i + 1) // stages] for i in range(stages)]


def cut(whole: Whole, stages: int, mesh: Mesh | None = None, **how) -> Pipeline:
    return run_stages(whole, decide(whole.captured.graph, mesh or mesh_of()), evenly(whole, stages), **how)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_blocks_of_a_model_are_what_the_cases_below_count_on(name: str, wholes):
    assert len(units(wholes[name][0].captured.graph)) == BLOCKS[name]


@pytest.mark.parametrize(
    ("name", "stages"), [(name, stages) for name in BLOCKS for stages in range(1, min(BLOCKS[name], 4) + 1)]
)
def test_stages_give_the_whole_programs_results(name: str, stages: int, wholes):
    whole, want = wholes[name]

    pipeline = cut(whole, stages, micro_batches=2)

    require_equal(pipeline, want, 2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", ["mlp", "tied", "skips", "translator", "repeated"])
def test_stages_under_random_decisions_give_the_whole_programs_results(name: str, stages: int, seed: int, wholes):
    whole, want = wholes[name]
    way: dict[str, Any] = ({"gather": "per_phase", "reduce": "microbatch"}, {"gather": "once"})[seed]
    decisions = drawn(whole.captured.graph, mesh_of(tp=2), seed, **way)

    pipeline = run_stages(whole, decisions, evenly(whole, stages), 2)

    require_equal(pipeline, want, 2)


@pytest.mark.parametrize("name", ["tied", "skips", "translator", "vision", "counting"])
def test_with_weight_gradients_apart_results_are_the_same(name: str, wholes):
    whole, want = wholes[name]

    pipeline = cut(whole, 3, split_backward=True)

    require_equal(pipeline, want)
    for program in pipeline.programs[0].stages.values():
        assert {item.kind for item in program.weights_gives} <= {"gradient"}


class Packed(nn.Module):
    """Layers whose one weight is for what comes from the layer before and for a table of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, 8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 16, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        for table, layer in zip(self.tables, self.layers, strict=True):
            own, other = layer.weight.split([8, 8])
            x = (x @ own + table(places) @ other).tanh()
        return x.square().mean()


@pytest.mark.parametrize("gather", [None, "once", "per_phase"])
@pytest.mark.parametrize("halves", [False, True])
def test_parts_of_a_weight_are_taken_where_it_is_split(gather: Gather | None, halves: bool):
    whole = Whole.of(Packed(), (torch.randn(4, 8), torch.randint(0, 5, (4,))))
    decisions, ranks = decide(whole.captured.graph, mesh_of()), 1
    if gather is not None:
        options, ranks = PlanOptions.parse(fix={"dp_shard": 2, "zero": 3}), 2
        decisions = plan_captured(whole.captured, "model", ClusterSpec.parse("cpu:2"), options, Silent()).decisions
        parameters = {name: replace(each, gather=gather) for name, each in decisions.parameters.items()}
        decisions = replace(decisions, parameters=parameters)

    pipeline = run_stages(whole, decisions, evenly(whole, 3), ranks, split_backward=halves)

    require_equal(pipeline, whole.run(), ranks)


@pytest.mark.parametrize("name", ["plain", "tied", "translator", "vision"])
def test_the_operators_priced_as_weight_gradients_are_those_that_run_apart(name: str, wholes):
    whole, _ = wholes[name]
    graph = whole.captured.graph
    priced = weight_gradients(graph, stage_of(graph, evenly(whole, 3)))

    stages = cut(whole, 3, split_backward=True).programs[0].stages.values()

    before, apart = (
        {node.name for gm in gms if gm for node in gm.graph.nodes if node.op == "call_function"}
        for gms in ([stage.backward for stage in stages], [stage.weights for stage in stages])
    )
    backward = {op.name for op in graph.ops if op.phase == "backward" and not is_view(op)}
    assert apart & backward == priced & backward & (before | apart)
    assert {name for name in priced if graph.by_name[name].target == "aten.mm.default"} <= apart


@pytest.mark.parametrize("blocks", [[["encoder.0"], ["encoder.1"]], [["encoder.0.attention"], ["encoder.0.mlp"]]])
def test_a_cut_through_recomputed_layers_gives_the_whole_programs_results(blocks):
    model, example = branching()["translator"]
    whole = Whole.of(model, example)
    want = whole.run()
    whole.captured = recomputed(capture(model, example), {"*": "full"})  # which writes into what it is given

    pipeline = run_stages(whole, decide(whole.captured.graph, mesh_of()), blocks)

    require_equal(pipeline, want)


def test_neighbours_of_a_chain_exchange_one_value_each_way(wholes):
    whole, _ = wholes["plain"]

    transfers = cut(whole, 3).programs[0].transfers

    assert [(t.source, t.target, t.phase) for t in transfers] == [
        (0, 1, "forward"), (1, 2, "forward"), (2, 1, "backward"), (1, 0, "backward"),
    ]  # fmt: skip


def test_skips_go_straight_to_the_stages_that_read_them(wholes):
    whole, _ = wholes["skips"]

    transfers = cut(whole, 3).programs[0].transfers

    pairs = {(t.source, t.target) for t in transfers if t.phase == "forward"}
    assert pairs == {(0, 1), (1, 2), (0, 2)}


def test_gradients_of_one_value_travel_as_one_sum(wholes):
    whole = Whole.of(Translator(4), branching()["translator"][1])

    transfers = cut(whole, 4).programs[0].transfers

    # The encoder's result and the decoder's path, each way: both decoder stages read the former twice.
    for source, target in ((1, 2), (1, 3), (3, 2), (2, 1)):
        assert sum((t.source, t.target) == (source, target) for t in transfers) <= 2


def test_masks_and_positions_are_made_where_they_are_read(wholes):
    whole, _ = wholes["translator"]

    transfers = cut(whole, 4).programs[0].transfers

    assert {(math.prod(t.shape), t.dtype) for t in transfers} == {(4 * 6 * 8, "float32")}


def test_a_tied_weight_is_on_the_stages_that_use_it_and_its_gradient_is_not_sent(wholes):
    whole, _ = wholes["tied"]
    weight = next(op.name for op in whole.captured.graph.ops if op.target == "embed.weight")

    programs = cut(whole, 3).programs[0]

    assert [(tie.name, tie.stages) for tie in programs.ties] == [(weight, (0, 2))]
    held = [stage for stage, p in programs.stages.items() if any(i.name == weight for i in p.takes)]
    assert held == [0, 2]
    gives = [stage for stage, p in programs.stages.items() if Item("gradient", weight) in p.backward_gives]
    assert gives == [0, 2]


def test_a_parameter_is_only_on_stages_that_use_it(wholes):
    whole, _ = wholes["translator"]
    graph = whole.captured.graph
    targets = {op.name: op.target for op in graph.ops if op.kind == "parameter"}

    programs = cut(whole, 4).programs[0]

    for unit, program in zip(units(graph), programs.stages.values(), strict=True):
        held = {targets[i.name] for i in (*program.takes, *program.backward_takes) if i.name in targets}
        assert held == set(unit.parameters)


def test_a_count_is_raised_by_every_stage_that_reads_it(wholes):
    whole, _ = wholes["counting"]

    programs = cut(whole, 3).programs[0]

    assert [[i.kind for i in p.gives].count("mutation") for p in programs.stages.values()] == [1, 1, 1]


def test_statistics_that_two_stages_change_are_refused():
    whole = Whole.of(Again(), (torch.randn(4, 8),))
    stages = [["layers.0"], ["layers.1"]]

    with pytest.raises(InfeasibleError, match=r"buffer norm\.running_\w+ is read on pipeline stage 0 .* on stage 1"):
        run_stages(whole, decide(whole.captured.graph, mesh_of()), stages)


def test_layers_that_change_the_same_statistics_are_one_block():
    whole = Whole.of(Again(), (torch.randn(4, 8),))

    assert [unit.path for unit in units(whole.captured.graph)] == ["layers.0"]


@pytest.mark.parametrize(
    ("gather", "reduce"), [("once", "step"), ("once", "microbatch"), ("per_phase", "step"), ("per_phase", "microbatch")]
)
def test_parameters_are_gathered_and_gradients_scattered_as_often_as_the_plan_says(
    gather: Gather, reduce: Reduce, wholes
):
    whole, want = wholes["mlp"]
    options = PlanOptions.parse(fix={"dp_shard": 2, "zero": 3})
    decisions = plan_captured(whole.captured, "model", ClusterSpec.parse("cpu:2"), options, Silent()).decisions
    parameters = {name: replace(each, gather=gather, reduce=reduce) for name, each in decisions.parameters.items()}
    decisions = replace(decisions, parameters=parameters)

    pipeline = run_stages(whole, decisions, [["up"], ["down"]], 2)

    require_equal(pipeline, want, 2)
    for program in pipeline.programs[0].stages.values():
        parts = [program.begin, program.forward, program.backward, program.finish]
        text = ["" if part is None else part.code for part in parts]
        gathers, scatters = ([name in each for each in text] for name in ("all_gather_into", "reduce_scatter"))
        assert gathers[0] == (gather == "once")
        assert any(gathers[1:]) == (gather == "per_phase")
        assert scatters == [False, False, reduce == "microbatch", reduce == "step"]


def test_gradients_are_reduced_once_a_step_and_together_where_the_plan_says_so(wholes):
    whole, want = wholes["mlp"]
    options = PlanOptions.parse(fix={"dp_replicate": 2})
    decisions = plan_captured(whole.captured, "model", ClusterSpec.parse("cpu:2"), options, Silent()).decisions
    assert len(decisions.buckets[0].tensors) == 4

    pipeline = run_stages(whole, decisions, [["up"], ["down"]], 2)

    require_equal(pipeline, want, 2)
    for program in pipeline.programs[0].stages.values():
        reductions = [str(node.target) for node in program.finish.graph.nodes if "all_reduce" in str(node.target)]
        assert reductions == ["_c10d_functional.all_reduce_coalesced.default"]
        assert not [node for node in program.backward.graph.nodes if "all_reduce" in str(node.target)]


class Shifted(nn.Module):
    """Scales by its weight and one, which is computed where the weight was, if nothing reads that again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + self.weight)


def test_what_is_gathered_for_all_microbatches_is_not_overwritten_by_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Shifted(), nn.Linear(8, 8))
    whole = Whole.of(model, (torch.randn(4, 8),))
    options = PlanOptions.parse(fix={"dp_shard": 2, "zero": 3})
    decisions = plan_captured(whole.captured, "model", ClusterSpec.parse("cpu:2"), options, Silent()).decisions
    parameters = {name: replace(each, gather="once") for name, each in decisions.parameters.items()}

    pipeline = run_stages(whole, replace(decisions, parameters=parameters), [["0", "1", "2"]], 3)

    require_equal(pipeline, whole.run(), 3)
