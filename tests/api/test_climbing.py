"""Cuts that the simulator finds against all cuts there are, each simulated by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.api import climbing
from autopar.api.block_costs import Ends, exposed_s
from autopar.api.climbing import Climbing
from autopar.ir.schedule import PipelineSchedule
from autopar.search.cuts import pipeline_costs
from autopar.search.stages import Assigned, Boundary, Unit
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zbv", 2)]
KINDS = 2


class Pipeline:
    """Blocks of drawn costs on two kinds of devices and of links."""

    def __init__(self, schedule: PipelineSchedule, count: int, seed: int) -> None:
        drawn = np.random.default_rng(seed)
        self.schedule, self.count = schedule, count
        held = drawn.integers(0, 7, (3, count)).tolist()
        kinds = [self._units(drawn.uniform(0.1, 3.0, (3, count)), held) for _ in range(KINDS)]
        crossing = drawn.integers(0, 7, count - 1).tolist()
        links = [self._boundaries(drawn.uniform(0.0, 1.0, (3, count - 1)), crossing) for _ in range(KINDS)]
        self.assigned = Assigned(
            tuple(kinds),
            tuple(links),
            tuple(drawn.integers(0, KINDS, schedule.ranks).tolist()),
            (0, *drawn.integers(0, KINDS, schedule.stages - 1).tolist()),
            tuple(drawn.integers(0, 3, schedule.ranks).tolist()),
        )
        self.once = [Ends(*drawn.uniform(0.0, 2.0, (5, count)).tolist()) for _ in range(KINDS)]

    @staticmethod
    def _units(seconds: np.ndarray, held: Sequence[Sequence[int]]) -> list[Unit]:
        return [
            Unit(
                forward_s=f, input_gradient_s=i, weight_gradient_s=w,
                static_bytes=static, activation_bytes=made, temporary_bytes=temporary,
            )
            for (f, i, w), static, made, temporary in zip(seconds.T.tolist(), *held, strict=True)
        ]  # fmt: skip

    @staticmethod
    def _boundaries(seconds: np.ndarray, crossing: Sequence[int]) -> list[Boundary]:
        rows = zip(seconds.T.tolist(), crossing, strict=True)
        return [Boundary(forward_s=f, backward_s=b, host_s=h, value_bytes=held) for (f, b, h), held in rows]

    def cuts(self) -> Iterator[tuple[int, ...]]:
        inner = itertools.combinations(range(1, self.count), self.schedule.stages - 1)
        return ((0, *each) for each in inner)

    def judged(self, cut: tuple[int, ...]) -> tuple[float, int]:
        """Return a cut's step, simulated, and what the largest rank holds, what it has less than others included."""
        assigned, rank_of = self.assigned, self.schedule.rank_of
        edges = list(assigned.boundaries[0])
        for stage, first in enumerate(cut[1:], start=1):
            edges[first - 1] = assigned.boundaries[assigned.link_of[stage]][first - 1]
        on_rank = [assigned.units[kind] for kind in assigned.device_of]
        timeline = simulate(self.schedule, pipeline_costs(assigned.units[0], edges, self.schedule, cut, on_rank))
        ends = []
        for rank, device in enumerate(assigned.device_of):
            stops = (*cut[1:], self.count)
            mine = [
                at
                for stage, (start, stop) in enumerate(zip(cut, stops, strict=True))
                for at in range(start, stop)
                if rank_of[stage] == rank
            ]
            units = [on_rank[rank][at] for at in mine]
            once = Ends(*(sum(each[at] for at in mine) for each in self.once[device]))
            forward_s = sum(unit.forward_s for unit in units)
            backward_s = sum(unit.input_gradient_s + unit.weight_gradient_s for unit in units)
            ends.append(timeline.ranks[rank].events[-1].end_s + exposed_s(once, forward_s, backward_s) + once.step_s)
        held = [rank.peak_bytes + less for rank, less in zip(timeline.ranks, assigned.less_bytes, strict=True)]
        return float(max(ends)), max(held)

    def climbing(self, budget_bytes: float) -> Climbing:
        return Climbing(self.assigned, self.schedule, budget_bytes, self.once)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    name, interleave = draw(st.sampled_from(SCHEDULES))
    schedule = generate(name, ranks=2, microbatches=draw(st.integers(1, 4)), interleave=interleave)
    return Pipeline(schedule, draw(st.integers(schedule.stages, 8)), draw(st.integers(0, 2**32 - 1)))


@given(pipelines())
def test_steps_are_the_simulators(pipeline: Pipeline):
    cuts = list(pipeline.cuts())

    step_s = pipeline.climbing(1e9).step_s(np.array([(*cut, pipeline.count) for cut in cuts]))

    assert step_s == pytest.approx([pipeline.judged(cut)[0] for cut in cuts], rel=1e-12)


@given(pipelines(), st.data())
@settings(max_examples=60)
def test_of_few_cuts_the_shortest_that_fits_is_found(pipeline: Pipeline, data: st.DataObject):
    judged = {cut: pipeline.judged(cut) for cut in pipeline.cuts()}
    budget = data.draw(st.sampled_from(sorted({held for _, held in judged.values()})))
    start = data.draw(st.sampled_from([cut for cut, (_, held) in judged.items() if held <= budget]))

    found = pipeline.climbing(budget).best(start)

    least_s = min(step_s for step_s, held in judged.values() if held <= budget)
    if found is None:
        assert least_s > 0.999 * judged[start][0] * (1 - 1e-9)
    else:
        assert judged[found][0] == pytest.approx(least_s, rel=1e-12)
        assert judged[found][1] <= budget
        assert least_s <= 0.999 * judged[start][0]


@given(pipelines(), st.data())
@settings(max_examples=60)
def test_of_many_cuts_one_is_found_that_no_block_elsewhere_makes_shorter(pipeline: Pipeline, data: st.DataObject):
    start = data.draw(st.sampled_from(list(pipeline.cuts())))
    with patch.object(climbing, "_FEW", 0):
        found = pipeline.climbing(1e9).best(start)

    assume(found is not None)
    stops = np.array([*found, pipeline.count])
    for giver, taker in itertools.permutations(range(pipeline.schedule.stages), 2):
        moved = stops.copy()
        moved[min(giver, taker) + 1 : max(giver, taker) + 1] += 1 if giver > taker else -1
        if np.diff(moved).min() > 0:
            assert pipeline.judged(tuple(moved[:-1].tolist()))[0] >= pipeline.judged(found)[0] * (1 - 1e-12)


@given(pipelines(), st.data())
def test_climbing_ends_where_its_work_is_spent(pipeline: Pipeline, data: st.DataObject):
    start = data.draw(st.sampled_from(list(pipeline.cuts())))

    with patch.object(climbing, "_WORK", 0):
        assert pipeline.climbing(1e9).best(start) is None
