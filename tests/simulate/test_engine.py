"""When ranks compute, send and wait, and what they hold."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.ir.pipeline import Edge, PipelineCosts, StageCost, equal_stages
from autopar.simulate.check import check
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate, names
from autopar.simulate.transfers import with_transfers
from tests.simulate.pipelines import UNIT_BYTES, interleaves, rank_costs, rows, swapped

STAGE = StageCost(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0)


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 12), transfer_s=st.floats(0.0, 1.0))
def test_overlapped_transfers_delay_gpipe_once_a_hop_and_direction(ranks: int, microbatches: int, transfer_s: float):
    schedule = generate("gpipe", ranks=ranks, microbatches=microbatches)

    timeline = simulate(schedule, rank_costs(ranks, transfer_s=transfer_s))

    expected_s = (microbatches + ranks - 1) * 3.0 + 2 * (ranks - 1) * transfer_s
    assert timeline.makespan_s == pytest.approx(expected_s, rel=1e-9)


@given(microbatches=st.integers(1, 12), transfer_s=st.floats(3.0, 9.0))
def test_a_link_slower_than_computation_moves_one_message_at_a_time(microbatches: int, transfer_s: float):
    schedule = generate("gpipe", ranks=2, microbatches=microbatches)

    timeline = simulate(schedule, rank_costs(2, transfer_s=transfer_s))

    # First forward, all activations, last forward and first backward, all gradients, last backward.
    assert timeline.makespan_s == pytest.approx(1.0 + 1.0 + 2.0 + 2.0 + 2 * microbatches * transfer_s, rel=1e-9)


def test_a_blocking_send_holds_its_rank():
    schedule = generate("gpipe", ranks=2, microbatches=3)

    timeline = simulate(schedule, rank_costs(2, transfer_s=0.5), blocking=True)

    first = timeline.ranks[0]
    assert [event.start_s for event in first.events[:3]] == [0.0, 1.5, 3.0]
    assert first.exposed_transfer_s == pytest.approx(3 * 0.5 + 3 * 0.5)  # its own sends, then each gradient's way


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("blocking", [False, True])
@given(
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    transfer_s=st.floats(0.0, 2.0),
    data=st.data(),
)
def test_timelines_keep_their_rules(
    name: str, blocking: bool, ranks: int, microbatches: int, transfer_s: float, data: st.DataObject
):
    v = data.draw(st.sampled_from(interleaves(name)))
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=v)

    timeline = simulate(schedule, rank_costs(ranks, v, transfer_s=transfer_s), blocking=blocking)

    for rank in timeline.ranks:
        parts_s = rank.compute_s + rank.exposed_transfer_s + rank.bubble_s
        assert parts_s == pytest.approx(timeline.makespan_s, rel=1e-9)
        assert all(a.end_s <= b.start_s for a, b in pairwise(rank.events))
        assert rank.memory[-1].held_bytes == 0
        assert rank.peak_bytes == max(point.held_bytes for point in rank.memory)
        assert all(a.at_s <= b.at_s for a, b in pairwise(rank.memory))
        for stream in {event.stream for event in rank.sends}:
            mine = [event for event in rank.sends if event.stream == stream]
            assert all(a.end_s <= b.start_s for a, b in pairwise(mine))
    assert_inputs_come_first(timeline, schedule.rank_of)


def assert_inputs_come_first(timeline, rank_of):
    made = {event.action: event for rank in timeline.ranks for event in rank.events}
    sent = {event.action: event for rank in timeline.ranks for event in rank.sends}
    for (stage, kind, microbatch), event in made.items():
        if kind == "W":
            continue
        before, send = (stage - 1, "SEND_F") if kind == "F" else (stage + 1, "SEND_B")
        if not 0 <= before < len(rank_of):
            continue
        if rank_of[before] != rank_of[stage]:
            assert sent[before, send, microbatch].end_s <= event.start_s
        else:
            ends = [made[before, k, microbatch].end_s for k in ("F", "B", "I") if (before, k, microbatch) in made]
            assert (min if kind == "F" else max)(ends) <= event.start_s


def test_waiting_for_a_message_is_exposed_transfer_and_waiting_for_its_making_is_bubble():
    timeline = simulate(generate("gpipe", ranks=2, microbatches=1), rank_costs(2, transfer_s=0.25))
    first, second = timeline.ranks

    assert timeline.makespan_s == 6.5
    assert (first.compute_s, first.exposed_transfer_s, first.bubble_s) == (3.0, 0.25, 3.25)
    assert (second.compute_s, second.exposed_transfer_s, second.bubble_s) == (3.0, 0.25, 3.25)


def test_a_skip_connection_holds_back_its_reader_and_its_gradients_reader():
    schedule = generate("gpipe", ranks=3, microbatches=1)
    plain = simulate(schedule, rank_costs(3))
    skipping = simulate(schedule, rank_costs(3, skips=(Edge(0, 2, forward_s=4.0, backward_s=7.0),)))

    forward = {str(event.action): event.start_s for rank in skipping.ranks for event in rank.events}
    assert plain.makespan_s == 9.0
    assert forward["2F0"] == 1.0 + 4.0
    assert forward["0B0"] == 5.0 + 1.0 + 2.0 + 7.0


@given(ranks=st.integers(2, 5), microbatches=st.integers(1, 9), v=st.integers(1, 3), data=st.data())
def test_schedules_with_skip_connections_run_with_their_transfers(
    ranks: int, microbatches: int, v: int, data: st.DataObject
):
    stages = ranks * v
    far = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    pairs = data.draw(st.lists(st.sampled_from(far), unique=True, max_size=4)) if far else []
    costs = rank_costs(ranks, v, skips=tuple(Edge(a, b, 0.5, 0.5) for a, b in pairs))
    schedule = generate("interleaved_1f1b", ranks=ranks, microbatches=microbatches, interleave=v)

    check(with_transfers(schedule, costs), costs=costs)


def test_full_backward_may_cost_less_than_its_halves():
    costs = equal_stages(1, dataclasses.replace(STAGE, backward_s=1.5))

    assert simulate(rows("0F0 0B0"), costs).makespan_s == 2.5
    assert simulate(rows("0F0 0I0 0W0"), costs).makespan_s == 3.0


def test_memory_follows_activations_what_is_kept_for_weight_gradients_and_what_is_always_there():
    stage = dataclasses.replace(STAGE, static_bytes=1000, activation_bytes=100, kept_bytes=30)

    (rank,) = simulate(rows("0F0 0F1 0I0 0W0 0B1"), equal_stages(1, stage)).ranks

    assert [tuple(point) for point in rank.memory] == [
        (0.0, 1000), (0.0, 1100), (1.0, 1200), (3.0, 1130), (4.0, 1100), (6.0, 1000),
    ]  # fmt: skip
    assert rank.peak_bytes == 1200


def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_stages_follow():
    costs = rank_costs(4)

    gpipe, one_f_one_b = (simulate(generate(n, ranks=4, microbatches=16), costs) for n in ("gpipe", "1f1b"))

    assert [rank.peak_bytes // UNIT_BYTES for rank in gpipe.ranks] == [16, 16, 16, 16]
    assert [rank.peak_bytes // UNIT_BYTES for rank in one_f_one_b.ranks] == [4, 3, 2, 1]


def test_written_out_transfers_change_nothing_in_the_timeline():
    costs = rank_costs(3, transfer_s=0.1)
    schedule = generate("1f1b", ranks=3, microbatches=5)

    assert simulate(with_transfers(schedule, costs), costs) == simulate(schedule, costs)


def test_a_deadlock_is_told_before_any_time_is_given():
    broken = swapped(generate("1f1b", ranks=2, microbatches=2), "1F0", "1B1")

    with pytest.raises(ScheduleError) as caught:
        simulate(broken, rank_costs(2))

    assert "rank 1 waits at 1B1" in str(caught.value)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ScheduleError) as caught:
        simulate(generate("1f1b", ranks=2, microbatches=2), rank_costs(3))

    assert str(caught.value) == "the schedule has 2 stages, but there are costs of 3"


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ((Edge(0, 1, 0.0, 0.0),), "no price of the transfer from stage 1 to stage 2"),
        ((Edge(2, 1, 0.0, 0.0),), "no edge from stage 2 to stage 1 of 3: edges go up"),
        ((Edge(0, 3, 0.0, 0.0),), "no edge from stage 0 to stage 3 of 3: edges go up"),
        ((Edge(0, 1, 0.0, 0.0), Edge(0, 1, 0.0, 0.0)), "two edges from stage 0 to stage 1: give the sum"),
    ],
)
def test_edges_that_are_missing_or_wrong_are_refused(edges: tuple[Edge, ...], message: str):
    with pytest.raises(ScheduleError) as caught:
        PipelineCosts((STAGE,) * 3, edges)

    assert message in str(caught.value)
