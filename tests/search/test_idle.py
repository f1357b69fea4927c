"""What ranks idle under each schedule, as estimates have it, against simulations of even stages."""

from __future__ import annotations

import pytest

from autopar.ir.pipeline import Edge, PipelineCosts, StageCost
from autopar.search.closed_forms import idle_share
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 4), (4, 16), (8, 8)])
@pytest.mark.parametrize(
    ("schedule", "interleave"),
    [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2)],
)
def test_a_step_is_the_work_and_what_ranks_idle(schedule: str, interleave: int, ranks: int, microbatches: int):
    stages, third = ranks * interleave, 1.0 / (3 * interleave)
    costs = PipelineCosts(
        tuple(
            StageCost(forward_s=third, input_gradient_s=third, weight_gradient_s=third, static_bytes=0)
            for _ in range(stages)
        ),
        tuple(Edge(stage, stage + 1, 0.0, 0.0) for stage in range(stages - 1)),
    )
    run = generate(schedule, ranks=ranks, microbatches=microbatches, interleave=interleave)

    idle = idle_share(schedule, ranks=ranks, interleave=interleave, microbatches=microbatches)

    assert simulate(run, costs).makespan_s == pytest.approx(
        microbatches + (ranks - 1) * idle, rel=0.15 if schedule == "zbv" else 0.01
    )
