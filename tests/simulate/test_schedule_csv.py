"""The CSV of torch.distributed.pipelining is read and written."""

from __future__ import annotations

import csv
import io

import pytest

from autopar.errors import ScheduleError, UsageError
from autopar.ir.schedule import Action, PipelineSchedule
from autopar.simulate.generators import generate, names
from autopar.simulate.transfers import with_transfers
from tests.simulate.pipelines import rank_costs


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("transfers", [False, True])
def test_a_schedule_read_back_equals_the_one_written(name: str, transfers: bool):
    schedule = generate(name, ranks=3, microbatches=5)
    if transfers:
        schedule = with_transfers(schedule, rank_costs(3, schedule.stages // 3))

    assert PipelineSchedule.from_csv(schedule.to_csv(), name) == schedule


def test_a_row_is_a_rank_in_torchs_letters():
    assert generate("zb_h1", ranks=2, microbatches=2).to_csv() == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


@pytest.mark.parametrize("name", names())
def test_torch_reads_what_is_written(name: str):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = generate(name, ranks=4, microbatches=6)
    reader = csv.reader(io.StringIO(schedule.to_csv()))
    actions = {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(reader)}

    rank_of = schedules._validate_schedule(actions, 4, schedule.stages, 6)

    assert [rank_of[stage] for stage in range(schedule.stages)] == list(schedule.rank_of)


def test_idle_steps_and_marks_of_sharded_parameters_are_left_out():
    read = PipelineSchedule.from_csv("0UNSHARD,0F0, ,,0B0,0RESHARD,0REDUCE_GRAD\r\n,1F0,1B0,,\r\n")

    assert [[str(action) for action in row] for row in read.actions] == [["0F0", "0B0"], ["1F0", "1B0"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 2, cell 2: '1X0' is no action: write stage, kind (F, B, I, W, SEND_F, RECV_F, "),
        ("(0F1;1B0)OVERLAP_F_B\n", "row 1, cell 1: '(0F1;1B0)OVERLAP_F_B' is no action"),
        ("0F0,0F\n", "row 1, cell 2: '0F' is no action"),
        ("0F0,0B0\n2F0,2B0\n", "the schedule has actions of stage 2, but none of stage 1"),
        (",\n", "the schedule holds no action; a row is a rank"),
    ],
)
def test_a_wrong_file_is_told_with_its_place(text: str, message: str):
    with pytest.raises(UsageError) as caught:
        PipelineSchedule.from_csv(text)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rank_of", "action", "message"),
    [
        ((0, 1), Action(0, "F", 0), "stage 1 is on rank 1, but the schedule has 1 ranks"),
        ((0,), Action(1, "F", 0), "rank 0 has 1F0, but the schedule has 1 stages and 2 micro-batches"),
        ((0,), Action(0, "F", 2), "rank 0 has 0F2, but the schedule has 1 stages and 2 micro-batches"),
    ],
)
def test_actions_outside_the_schedule_are_refused(rank_of: tuple[int, ...], action: Action, message: str):
    with pytest.raises(ScheduleError) as caught:
        PipelineSchedule(rank_of, 2, ((action,),))

    assert message in str(caught.value)
