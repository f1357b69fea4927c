"""Estimates of trials, and the bounds that follow from them, against the plans that the search makes."""

from __future__ import annotations

from math import inf

import pytest
import torch

from autopar.api.estimating import Estimates
from autopar.api.sequences import share_of_tokens
from autopar.api.solving import Solved, Solving, Waiting
from autopar.api.wishes import read_wishes
from autopar.capture import Captured
from autopar.models.zoo.llama import LlamaSettings
from autopar.options import PlanOptions
from autopar.search.meshes import MeshAxis, Role
from autopar.search.trials import Trial, Uniform
from tests.api.test_outer import CAPTURED, Deep, cluster
from tests.support.remembering import remembered

MANY_SAMPLES = remembered(Deep(), (torch.empty(8192, 128),))
LLAMA = LlamaSettings(1, 64, 8, 4, 64, vocab=64, sequence=64)
TOKENS = remembered(LLAMA.model(), LLAMA.inputs(4, 64))


def estimates(program: Captured = CAPTURED) -> Estimates:
    options = PlanOptions.parse(memory_margin=0.0, gap=0.0)
    solving = Solving(program.graph, cluster(), options)
    return Estimates(solving, read_wishes(options), False, lambda: 60.0)


def step_s(of: Estimates, trial: Trial) -> float:
    priced = of.solving.bound(trial, of.wishes, 60.0)
    assert not isinstance(priced, Solved)
    return of.solving.solve(priced, of.wishes, [], inf, 60.0).step_s


@pytest.mark.parametrize("role", ["dp_shard", "dp_replicate", "tp", "free"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("program", [CAPTURED, MANY_SAMPLES], ids=["few samples", "many samples"])
def test_no_plan_of_a_trial_beats_its_bound(program: Captured, recompute: Uniform, role: Role):
    found = estimates(program)
    trial = Trial((MeshAxis(role, 4),), recompute=recompute)
    found.of([trial], fits=False)

    assert found.bound_s(trial) <= step_s(found, trial) * (1 + 1e-9)


@pytest.mark.parametrize("axes", [{"cp": 4}, {"cp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}], ids=str)
def test_no_plan_that_splits_tokens_beats_its_bound(axes: dict[Role, int]):
    found = estimates(TOKENS)
    trial = Trial(tuple(MeshAxis(role, size) for role, size in axes.items()))
    likely = found.of([trial], fits=False)
    priced = found.solving.bound(trial, found.wishes, 60.0)

    assert isinstance(priced, Waiting)
    assert 0.0 < found.bound_s(trial) <= priced.bound_s * (1 + 1e-9)
    assert likely[trial] < inf


def test_attention_is_split_by_tokens_as_far_as_heads_go():
    graph = TOKENS.graph

    assert share_of_tokens(graph, 1, 4) == 1.0
    assert share_of_tokens(graph, 4, 1) == share_of_tokens(graph, 2, 1) / 2 == 0.25
    assert share_of_tokens(graph, 2, 4) == 0.5
    assert 0.25 < share_of_tokens(graph, 4, 4) < 1.0


def test_what_tensor_parallel_ranks_take_says_nothing_of_axes_that_may_split_the_batch():
    """With many samples a free axis splits them, which takes far less than tensor parallelism."""
    found = estimates(MANY_SAMPLES)
    free, tensor = (Trial((MeshAxis(role, 4),)) for role in ("free", "tp"))
    found.of([free, tensor], fits=False)

    assert found.bound_s(tensor) > 1.1 * step_s(found, free)
    assert found.bound_s(free) == found.microbatch_s(free) == 0.0
