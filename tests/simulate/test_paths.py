"""The longest path through a schedule takes as long as its simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.pipeline import Edge, PipelineCosts, StageCost
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate, names
from autopar.simulate.paths import Paths
from tests.simulate.pipelines import interleaves


@pytest.mark.parametrize("name", names())
@given(
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
    handed_s=st.sampled_from((0.0, 0.05)),
    data=st.data(),
)
def test_it_takes_as_long_as_the_step_and_is_no_longer_for_other_costs(
    name: str, ranks: int, microbatches: int, seed: int, handed_s: float, data: st.DataObject
):
    schedule = generate(
        name, ranks=ranks, microbatches=microbatches, interleave=data.draw(st.sampled_from(interleaves(name)))
    )
    # Messages are quicker than any computation, so that none waits for the one before it.
    one, other = np.random.default_rng(seed).uniform(0.1, 3.0, (2, 3, schedule.stages))
    paths = Paths(schedule)

    path = paths.longest(one, handed_s)

    def makespan_s(seconds: np.ndarray) -> float:
        stages = [
            StageCost(forward_s=f, input_gradient_s=i, weight_gradient_s=w) for f, i, w in zip(*seconds, strict=True)
        ]
        edges = tuple(Edge(s, s + 1, handed_s, handed_s) for s in range(schedule.stages - 1))
        return simulate(schedule, PipelineCosts(tuple(stages), edges)).makespan_s

    assert (path.passes * one).sum() + path.handed * handed_s == pytest.approx(makespan_s(one), rel=1e-9)
    assert (path.passes * other).sum() + path.handed * handed_s <= makespan_s(other) * (1 + 1e-9)
