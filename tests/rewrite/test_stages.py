"""Programs of pipeline stages, all stages and ranks in one process, against the whole program."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.mesh import Mesh
from autopar.ir.stages import units
from tests.support.branching import branching
from tests.support.decide import decide, drawn, mesh_of
from tests.support.models import cases
from tests.support.staged import Pipeline, require_equal, run_stages
from tests.support.whole import Whole

BLOCKS = {
    "mlp": 2, "plain": 3, "twin": 3, "vision": 3, "tied": 5, "skips": 6, "translator": 4, "counting": 3, "repeated": 4
}  # fmt: skip
"""How many blocks each model has."""


@pytest.fixture(scope="module")
def wholes() -> dict[str, tuple[Whole, list[torch.Tensor | None]]]:
    models = {**cases(), **branching()}
    found = {name: Whole.of(*models[name]) for name in BLOCKS}
    return {name: (whole, whole.run()) for name, whole in found.items()}


def evenly(whole: Whole, stages: int) -> list[list[str]]:
    """Return the blocks of so many stages, about as many for each."""
    paths = [unit.path for unit in units(whole.captured.graph)]
    return [paths[len(paths) * i // stages : len(paths) * (i + 1) // stages] for i in range(stages)]


def cut(whole: Whole, stages: int, mesh: Mesh | None = None, **how) -> Pipeline:
    mesh = mesh or mesh_of()
    return run_stages(whole, decide(whole.captured.graph, mesh, **how), evenly(whole, stages))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_blocks_of_a_model_are_what_the_cases_below_count_on(name: str, wholes):
    assert len(units(wholes[name][0].captured.graph)) == BLOCKS[name]


@pytest.mark.parametrize(
    ("name", "stages"), [(name, stages) for name in BLOCKS for stages in range(1, min(BLOCKS[name], 4) + 1)]
)
def test_stages_give_the_whole_programs_results(name: str, stages: int, wholes):
    whole, want = wholes[name]

    pipeline = run_stages(whole, decide(whole.captured.graph, mesh_of()), evenly(whole, stages), 2)

    require_equal(pipeline, want, 2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "tied", "skips", "translator", "repeated"])
def test_stages_split_by_tensor_parallelism_give_the_whole_programs_results(name: str, stages: int, seed: int, wholes):
    whole, want = wholes[name]
    gather = "once" if seed == 1 else "per_phase"
    decisions = drawn(whole.captured.graph, mesh_of(tp=2), seed, gather=gather, greedy=seed == 2)

    pipeline = run_stages(whole, decisions, evenly(whole, min(stages, len(units(whole.captured.graph)))), 2)

    require_equal(pipeline, want, 2)
