"""Many cuts simulated at once end when each would alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.ir.pipeline import Edge, PipelineCosts, StageCost
from autopar.ir.schedule import PipelineSchedule
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate, names
from autopar.simulate.together import Together
from tests.simulate.pipelines import interleaves, rows


def costs_of(
    schedule: PipelineSchedule, seconds: dict[str, np.ndarray], sent: tuple[np.ndarray, np.ndarray], cut: int
) -> PipelineCosts:
    stages = range(schedule.stages)
    forward, inputs, weights = (seconds[kind][:, cut] for kind in "FIW")
    return PipelineCosts(
        tuple(
            StageCost(forward_s=forward[s], input_gradient_s=inputs[s], weight_gradient_s=weights[s]) for s in stages
        ),
        tuple(Edge(s, s + 1, float(sent[0][s, cut]), float(sent[1][s + 1, cut])) for s in stages[:-1]),
    )


@pytest.mark.parametrize("name", names())
@given(ranks=st.integers(1, 5), microbatches=st.integers(1, 8), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_ranks_end_when_they_would_alone(name: str, ranks: int, microbatches: int, seed: int, data: st.DataObject):
    schedule = generate(
        name, ranks=ranks, microbatches=microbatches, interleave=data.draw(st.sampled_from(interleaves(name)))
    )
    drawn = np.random.default_rng(seed)
    seconds = {kind: drawn.uniform(0.0, 3.0, (schedule.stages, 3)) for kind in "FIW"}
    sent = (drawn.uniform(0.0, 4.0, (schedule.stages, 3)), drawn.uniform(0.0, 4.0, (schedule.stages, 3)))

    ends_s = Together(schedule).ends_s({**seconds, "B": seconds["I"] + seconds["W"]}, *sent)

    for cut in range(3):
        alone = simulate(schedule, costs_of(schedule, seconds, sent, cut))
        assert ends_s[:, cut].tolist() == [rank.events[-1].end_s for rank in alone.ranks]


def test_ranks_that_wait_for_one_another_are_an_error():
    with pytest.raises(ScheduleError):
        Together(rows("0F0 0B0", "1B0 1F0"))
