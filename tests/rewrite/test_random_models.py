"""Random models under random decisions: operators meet layouts that no search would choose for them."""

from __future__ import annotations

import pytest

from benchmarks.architectures import build
from tests.support.decide import drawn, mesh_of
from tests.support.whole import Whole, run_ranks

MESHES = [mesh_of(tp=2), mesh_of(dp=2, tp=2), mesh_of(tp=3), mesh_of(tp=4), mesh_of(dp=2, tp=3)]
SEEDS = [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60) if seed != 2)]

_LEAST = 1e-6
"""Norm from which differences are relative: what is nothing but rounding has no digits."""


@pytest.mark.parametrize("seed", SEEDS)
def test_random_models_under_random_decisions_compute_what_one_device_does(seed: int):
    model, inputs = build(f"random:{seed}@float64")
    whole = Whole.of(model, inputs)
    expected = whole.run()
    for draw in range(3):
        mesh = MESHES[(seed + draw) % len(MESHES)]
        decisions = drawn(
            whole.captured.graph, mesh, 3 * seed + draw, greedy=draw == 2, gather=("per_phase", "once")[draw % 2]
        )

        ranked = run_ranks(whole, decisions)

        for place, want in enumerate(expected):
            for rank in range(mesh.world_size if want is not None else 0):
                wanted, mine = ranked.expected(rank, place, want), ranked.held(rank, place, want)
                apart = (mine - wanted).abs().double().norm() / want.abs().double().norm().clamp(min=_LEAST)
                assert apart < 1e-9, f"{whole.captured.graph.outputs[place].name} of rank {rank} of {mesh}, draw {draw}"
