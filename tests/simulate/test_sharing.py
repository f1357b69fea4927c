"""Ranks that share cores slow one another down only while they compute at the same time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.cores import SharedCores
from autopar.ir.pipeline import Edge, PipelineCosts, StageCost, equal_stages
from autopar.ir.schedule import PipelineSchedule
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate, names
from tests.simulate.pipelines import interleaves, rank_costs, rows
from tests.simulate.test_engine import assert_inputs_come_first

STAGE = StageCost(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0)
SECONDS = st.integers(0, 4).map(lambda quarters: quarters / 4)


@st.composite
def costs_of(draw: st.DrawFn, stages: int) -> PipelineCosts:
    made = []
    for _ in range(stages):
        seconds = [draw(SECONDS) for _ in range(3)]
        waiting = [draw(st.sampled_from([0.0, each / 2, each])) for each in seconds]
        made.append(StageCost(**dict(zip(_SECONDS, [*seconds, *waiting], strict=True))))
    return PipelineCosts(tuple(made), tuple(Edge(s, s + 1, draw(SECONDS), draw(SECONDS)) for s in range(stages - 1)))


_SECONDS = [
    f"{what}_{part}" for part in ("s", "waiting_s") for what in ("forward", "input_gradient", "weight_gradient")
]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("blocking", [False, True])
@given(ranks=st.integers(1, 5), microbatches=st.integers(1, 8), more=st.integers(0, 2), data=st.data())
def test_with_a_core_a_rank_nothing_is_slower(
    name: str, blocking: bool, ranks: int, microbatches: int, more: int, data: st.DataObject
):
    v = data.draw(st.sampled_from(interleaves(name)))
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=v)
    costs = data.draw(costs_of(schedule.stages))

    apart = simulate(schedule, costs, blocking=blocking)
    shared = simulate(schedule, costs, blocking=blocking, shared=SharedCores(cores=ranks + more, ranks=ranks))

    assert shared == apart


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["1f1b", "zb_h1", "gpipe", "interleaved_1f1b"]),
    ranks=st.integers(2, 4),
    microbatches=st.integers(1, 4),
    cores=st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0]),
    data=st.data(),
)
def test_event_by_event_is_as_in_fine_steps_of_time(
    name: str, ranks: int, microbatches: int, cores: float, data: st.DataObject
):
    v = 2 if name == "interleaved_1f1b" else 1
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=v).compute_only()
    costs = data.draw(costs_of(schedule.stages))

    found = simulate(schedule, costs, shared=SharedCores(cores=cores, ranks=ranks))

    ends = {event.action: event.end_s for rank in found.ranks for event in rank.events}
    step_s = 1 / 512
    stepped = in_fine_steps(schedule, costs, cores, step_s)
    assert ends.keys() == stepped.keys()
    slack_s = len(ends) * step_s  # each action ends up to a step late, and all that follow it
    assert all(abs(ends[action] - stepped[action]) <= slack_s for action in ends)


def in_fine_steps(schedule: PipelineSchedule, costs: PipelineCosts, cores: float, step_s: float) -> dict:
    """End of each action where all ranks go on together by steps of time: who is at work has the same part of cores."""
    position = [0] * schedule.ranks
    left: dict[int, list[float]] = {}  # of the action under way: work, waiting
    ends: dict = {}
    arrived: dict = {}  # by stage, way and micro-batch: when the value is there
    wire: dict = {}
    now = 0.0

    def ready(action) -> bool:
        stage, kind, microbatch = action
        way = "F" if kind == "F" else "I"
        near = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= near < schedule.stages:
            return True
        return arrived.get((stage, way, microbatch), float("inf")) <= now

    def end(rank: int, action) -> None:
        stage, kind, microbatch = action
        ends[action] = now
        way, near = ("F", stage + 1) if kind == "F" else ("I", stage - 1)
        if kind != "W" and 0 <= near < schedule.stages:
            edge = costs.edges[min(stage, near)]
            seconds = edge.forward_s if kind == "F" else edge.backward_s
            other = schedule.rank_of[near]
            if other == rank:
                arrived[near, way, microbatch] = now
            else:
                wire[rank, other] = max(now, wire.get((rank, other), 0.0)) + seconds
                arrived[near, way, microbatch] = wire[rank, other]

    while len(ends) < sum(map(len, schedule.actions)):
        moved = True
        while moved:  # what takes no time happens at once
            moved = False
            for rank, row in enumerate(schedule.actions):
                if rank in left and max(left[rank]) <= 1e-9:
                    del left[rank]
                    end(rank, row[position[rank]])
                    position[rank] += 1
                    moved = True
                if rank not in left and position[rank] < len(row) and ready(row[position[rank]]):
                    action = row[position[rank]]
                    cost = costs.stages[action.stage]
                    waiting_s = cost.waiting_s(action.kind)
                    left[rank] = [cost.seconds(action.kind) - waiting_s, waiting_s]
                    moved = True
        at_work = [rank for rank, (work_s, _) in left.items() if work_s > 1e-9]
        for parts in left.values():
            which = 0 if parts[0] > 1e-9 else 1
            parts[which] -= step_s * (min(1.0, cores / len(at_work)) if which == 0 else 1.0)
        now += step_s
    return ends


@given(
    name=st.sampled_from(names()),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 8),
    cores=st.floats(0.3, 5.0),
    data=st.data(),
)
def test_shared_timelines_keep_their_rules(name: str, ranks: int, microbatches: int, cores: float, data: st.DataObject):
    v = data.draw(st.sampled_from(interleaves(name)))
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=v)
    costs = data.draw(costs_of(schedule.stages))

    apart = simulate(schedule, costs)
    shared = simulate(schedule, costs, shared=SharedCores(cores=cores, ranks=ranks))

    work_s = sum(
        costs.stages[e.action.stage].seconds(e.action.kind) - costs.stages[e.action.stage].waiting_s(e.action.kind)
        for rank in shared.ranks
        for e in rank.events
    )
    assert shared.makespan_s >= max(apart.makespan_s * (1 - 1e-9), work_s / cores * (1 - 1e-9))
    assert [[e.action for e in rank.events] for rank in shared.ranks] == [
        [e.action for e in rank.events] for rank in apart.ranks
    ]
    for rank in shared.ranks:
        parts_s = rank.compute_s + rank.exposed_transfer_s + rank.bubble_s
        assert parts_s == pytest.approx(shared.makespan_s, rel=1e-9)
    assert_inputs_come_first(shared, schedule.rank_of)


@given(ranks=st.integers(2, 6), microbatches=st.integers(1, 8))
def test_on_one_core_a_pipeline_has_the_time_of_its_work_and_no_core_is_idle(ranks: int, microbatches: int):
    timeline = simulate(
        generate("1f1b", ranks=ranks, microbatches=microbatches),
        rank_costs(ranks),
        shared=SharedCores(cores=1.0, ranks=ranks),
    )

    assert timeline.makespan_s == pytest.approx(3.0 * ranks * microbatches, rel=1e-9)


def test_two_ranks_on_one_core_take_turns_while_both_compute_and_have_it_alone_else():
    costs = equal_stages(2, STAGE)

    timeline = simulate(rows("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), costs, shared=SharedCores(cores=1.0, ranks=2))

    # 0F1 and 1F0 side by side at half the rate, then the second rank alone until its first gradient is made.
    first, second = ([(str(e.action), e.start_s, e.end_s) for e in rank.events] for rank in timeline.ranks)
    assert first == [("0F0", 0.0, 1.0), ("0F1", 1.0, 3.0), ("0B0", 6.0, 10.0), ("0B1", 10.0, 12.0)]
    assert second == [("1F0", 1.0, 3.0), ("1F1", 3.0, 4.0), ("1B0", 4.0, 6.0), ("1B1", 6.0, 10.0)]


def test_waiting_for_collectives_takes_no_core():
    half = dataclasses.replace(STAGE, forward_s=2.0, forward_waiting_s=1.0)

    timeline = simulate(rows("0F0 0F1", "1F0 1F1"), equal_stages(2, half), shared=SharedCores(cores=1.0, ranks=2))

    # The work of 0F1 and 1F0 share the core from 2 to 4 s, and both wait until 5 s; the work of 1F1 has the core alone.
    assert [rank.events[-1].end_s for rank in timeline.ranks] == [5.0, 7.0]


def test_ranks_of_other_machines_take_nothing_and_those_of_one_pipeline_rank_count_each():
    assert SharedCores(cores=2.0, ranks=2).rates([0, 1, 2]) == {0: 1.0, 1: 1.0, 2: 1.0}
    assert SharedCores(cores=1.0, ranks=2).rates([0, 1, 2]) == {0: 0.5, 1: 0.5, 2: 1.0}
    assert SharedCores(cores=2.0, ranks=4, width=2).rates([0]) == {0: 1.0}
    assert SharedCores(cores=2.0, ranks=4, width=2).rates([0, 1]) == {0: 0.5, 1: 0.5}
    # The second of three pipeline ranks lies on both machines: two of its ranks are with the first, one with the third.
    assert SharedCores(cores=3.0, ranks=5, width=3).rates([0, 1, 2]) == {0: 0.6, 1: 0.6, 2: 0.75}


def test_no_core_at_all_is_refused():
    with pytest.raises(ValueError, match="4 ranks in groups of 1 cannot share 0 cores: more than 0 of each"):
        SharedCores(cores=0.0, ranks=4)
