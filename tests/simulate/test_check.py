"""Broken schedules are found, and the message names rank, action and micro-batch."""

from __future__ import annotations

import pytest

from autopar.errors import ScheduleError
from autopar.ir.pipeline import StageCost, equal_stages
from autopar.ir.schedule import Action, PipelineSchedule
from autopar.simulate.check import check, problems
from autopar.simulate.generators import generate, names
from autopar.simulate.transfers import with_transfers
from tests.simulate.pipelines import rank_costs, rows, swapped, without

PLAIN = generate("1f1b", ranks=2, microbatches=3)
SENDING = with_transfers(PLAIN, rank_costs(2))


def test_the_schedules_to_break_are_whole():
    check(PLAIN)
    check(SENDING, rendezvous=True)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        pytest.param(
            without(PLAIN, "0F2"),
            "rank 0 never runs 0F2 (forward of stage 0, micro-batch 2)",
            id="forward dropped",
        ),
        pytest.param(
            without(PLAIN, "1B1"),
            "rank 1 never runs 1B1 (backward of stage 1, micro-batch 1)",
            id="backward dropped",
        ),
        pytest.param(
            without(generate("zb_h1", ranks=2, microbatches=3), "1W0"),
            "rank 1 never runs 1W0 (weight gradient of stage 1, micro-batch 0)",
            id="weight gradient dropped",
        ),
        pytest.param(
            rows("0F0 0B0 0B0"),
            "rank 0 runs 0B0 (backward of stage 0, micro-batch 0) 2 times",
            id="action twice",
        ),
        pytest.param(
            rows("0F0 0B0 0W0"),
            "rank 0 runs both 0B0 and 0W0 (weight gradient of stage 0, micro-batch 0), which is a part of it",
            id="full backward and a half",
        ),
        pytest.param(
            rows("0F0 0B0", "1F0 1B0 0F1 0B1 1F1 1B1"),
            "rank 1 runs 0F1 (forward of stage 0, micro-batch 1), but stage 0 is on rank 0",
            id="stage on two ranks",
        ),
        pytest.param(
            swapped(PLAIN, "0F0", "0B0"),
            "rank 0 waits at 0B0 (backward of stage 0, micro-batch 0) for 0F0, which it runs only later",
            id="backward before forward",
        ),
        pytest.param(
            swapped(PLAIN, "1F0", "1B0"),
            "rank 1 waits at 1B0 (backward of stage 1, micro-batch 0) for 1F0, which it runs only later",
            id="last stage's backward before its forward",
        ),
        pytest.param(
            rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "deadlock, each waits for the next: rank 0 at 0B0 (backward of stage 0, micro-batch 0) for 1I0 of rank 1; "
            "rank 1 at 1F1 (forward of stage 1, micro-batch 1) for 0F1 of rank 0",
            id="deadlock of two ranks",
        ),
        pytest.param(
            without(SENDING, "0SEND_F1"),
            "rank 0 never sends 0SEND_F1 (send of the activation of stage 0, micro-batch 1), which rank 1 receives by "
            "1RECV_F1",
            id="send dropped",
        ),
        pytest.param(
            without(SENDING, "0RECV_B2"),
            "rank 0 never receives 0RECV_B2 (receive of the gradient of stage 0, micro-batch 2), which rank 1 sends by "
            "1SEND_B2",
            id="receive dropped",
        ),
        pytest.param(
            without(without(SENDING, "0SEND_F1"), "1RECV_F1"),
            "rank 1 waits at 1F1 (forward of stage 1, micro-batch 1) for 1RECV_F1, which no rank runs",
            id="send and receive dropped",
        ),
        pytest.param(
            swapped(SENDING, "1RECV_F0", "1RECV_F1"),
            "message 0 from rank 0 to rank 1 is 0SEND_F0 where it is sent, but 1RECV_F1 (receive of the activation of "
            "stage 1, micro-batch 1) where it is received",
            id="receives in another order than sends",
        ),
        pytest.param(
            rows("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            "rank 0 has 0SEND_B0 (send of the gradient of stage 0, micro-batch 0), but there is no stage on "
            "another rank to do it with",
            id="send to nobody",
        ),
    ],
)
def test_what_is_broken_is_named(schedule: PipelineSchedule, message: str):
    with pytest.raises(ScheduleError) as caught:
        check(schedule)

    assert message in str(caught.value)


def test_sends_that_wait_for_receives_deadlock_where_buffered_ones_do_not():
    crossing = rows(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )

    check(crossing)
    with pytest.raises(ScheduleError) as caught:
        check(crossing, rendezvous=True)

    assert (
        "deadlock, each waits for the next: rank 0 at 0SEND_F1 (send of the activation of stage 0, micro-batch 1) for "
        "1RECV_F1 of rank 1; rank 1 at 1SEND_B0 (send of the gradient of stage 1, micro-batch 0) for 0RECV_B0 of rank 0"
    ) in str(caught.value)


@pytest.mark.parametrize("name", names())
def test_every_single_dropped_action_is_noticed(name: str):
    schedule = generate(name, ranks=3, microbatches=4)
    whole = with_transfers(schedule, rank_costs(3, schedule.stages // 3))

    for action in [action for row in whole.actions for action in row]:
        assert str(action) in "\n".join(problems(without(whole, str(action)))), action


def test_ranks_that_only_wait_for_a_deadlocked_pair_are_left_out():
    schedule = rows("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")

    (problem,) = problems(schedule)

    assert problem.startswith("deadlock")
    assert "rank 0" not in problem


def test_many_problems_are_told_in_a_few_lines():
    nothing = PipelineSchedule((0,), 10, ((Action(0, "F", 0),),), "empty")

    with pytest.raises(ScheduleError) as caught:
        check(nothing)

    first, *others = str(caught.value).splitlines()
    assert first == "schedule 'empty' of 1 ranks cannot run, 19 problems:"
    assert len(others) == 9
    assert others[-1] == "    and 11 more"


COSTS = equal_stages(
    2,
    StageCost(
        forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0, static_bytes=4 * 2**30, activation_bytes=2**30
    ),
)


def test_a_rank_over_the_budget_is_named_with_the_action_that_exceeds_it():
    with pytest.raises(ScheduleError) as caught:
        check(PLAIN, costs=COSTS, budget_bytes=5 * 2**30)

    assert str(caught.value) == (
        "schedule '1f1b' of 2 ranks cannot run, 1 problem:\n"
        "    rank 0 exceeds its memory from 0F1 (forward of stage 0, micro-batch 1) on: its peak is 6.00 GiB, of which "
        "4.00 GiB stay all the time, and the budget is 5.00 GiB; fewer micro-batches in flight (--fix schedule=1f1b), "
        "smaller ones (--fix microbatch=N) or recomputation (--fix recompute=full) need less"
    )


def test_a_budget_that_suffices_to_the_byte_is_no_problem():
    check(PLAIN, costs=COSTS, budget_bytes=6 * 2**30)

    assert len(problems(PLAIN, costs=COSTS, budget_bytes=6 * 2**30 - 1)) == 1


def test_parameters_that_do_not_fit_are_told_without_an_action():
    (first, _) = problems(PLAIN, costs=COSTS, budget_bytes=3 * 2**30)

    assert first.startswith("rank 0 exceeds its memory before its first action: its peak is 6.00 GiB")
