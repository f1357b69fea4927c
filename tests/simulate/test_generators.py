"""Named schedules: every one can run, and they are the ones that torch knows by these names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import UsageError
from autopar.ir.schedule import PipelineSchedule
from autopar.simulate.check import check
from autopar.simulate.generators import generate, named, names, rounds
from autopar.simulate.transfers import with_transfers
from tests.simulate.pipelines import interleaves, rank_costs

SHAPES = [(name, v) for name in names() for v in interleaves(name)]
RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 20)


@pytest.mark.parametrize(("name", "interleave"), SHAPES)
@given(ranks=RANKS, microbatches=MICROBATCHES)
def test_every_generated_schedule_can_run(name: str, interleave: int, ranks: int, microbatches: int):
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=interleave)

    check(schedule)

    assert schedule.stages == ranks * interleave
    assert sum(action.kind == "F" for row in schedule.actions for action in row) == schedule.stages * microbatches
    assert any(action.kind == "W" for row in schedule.actions for action in row) == named(name).splits_backward


@pytest.mark.parametrize(("name", "interleave"), SHAPES)
@given(ranks=RANKS, microbatches=MICROBATCHES, transfer_s=st.sampled_from([0.0, 0.3, 5.0]))
def test_with_transfers_it_can_run_even_where_sends_wait_for_receives(
    name: str, interleave: int, ranks: int, microbatches: int, transfer_s: float
):
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=interleave)

    whole = with_transfers(schedule, rank_costs(ranks, interleave, transfer_s=transfer_s))

    check(whole, rendezvous=True)
    assert whole.has_transfers == (ranks > 1)
    assert whole.compute_only().actions == schedule.actions


def test_stages_go_round_the_ranks_and_for_zbv_down_and_back():
    assert generate("interleaved_1f1b", ranks=3, microbatches=1, interleave=2).rank_of == (0, 1, 2, 0, 1, 2)
    assert generate("zbv", ranks=3, microbatches=1).rank_of == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "sizes"), [(4, 8, (4, 4)), (4, 10, (5, 5)), (4, 11, (6, 5)), (4, 3, (3,)), (1, 2, (1, 1))]
)
def test_rounds_differ_by_one_micro_batch_at_most(ranks: int, microbatches: int, sizes: tuple[int, ...]):
    assert rounds(ranks, microbatches) == sizes


def test_an_unknown_name_is_answered_with_the_closest():
    with pytest.raises(UsageError) as caught:
        generate("1fb1", ranks=2, microbatches=2)

    assert str(caught.value) == (
        "unknown schedule '1fb1' (did you mean '1f1b'?); known: gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zbv", 2, 2, 3), "schedule 'zbv' has 2 stages a rank, not 3: use --fix interleave=2"),
        (("1f1b", 2, 2, 2), "schedule '1f1b' has 1 stages a rank, not 2: use --fix interleave=1"),
        (("1f1b", 0, 2, 1), "a pipeline schedule needs at least 1 of ranks, not 0"),
        (("gpipe", 2, 0, 1), "a pipeline schedule needs at least 1 of micro-batches, not 0"),
        (("interleaved_1f1b", 2, 1, -1), "a pipeline schedule needs at least 1 of stages a rank, not -1"),
    ],
)
def test_wrong_numbers_are_told(arguments: tuple[str, int, int, int], message: str):
    name, ranks, microbatches, interleave = arguments
    with pytest.raises(UsageError) as caught:
        generate(name, ranks=ranks, microbatches=microbatches, interleave=interleave)

    assert message in str(caught.value)


def cells(schedule: PipelineSchedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.actions]


def torch_cells(order: dict[int, list[object]]) -> list[list[str]]:
    """Rows of torch's own order, without idle steps and marks of gradient reduction."""
    return [[str(a) for a in order[r] if a is not None and "REDUCE" not in str(a)] for r in sorted(order)]


SIZES = pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (3, 7), (4, 4), (4, 9), (4, 2)])


@SIZES
def test_gpipe_is_torchs(ranks: int, microbatches: int):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = object.__new__(schedules.ScheduleGPipe)
    theirs._num_stages, theirs._n_microbatches = ranks, microbatches

    ours = generate("gpipe", ranks=ranks, microbatches=microbatches)

    assert cells(ours) == torch_cells(theirs._get_pipeline_order())


@SIZES
def test_1f1b_is_torchs(ranks: int, microbatches: int):
    # By its helper for any 1F1B: the listing of Schedule1F1B itself starts at micro-batch 1 on the last rank (2.13).
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = {}
    for rank in range(ranks):
        ahead = schedules._get_warmup_ops(rank, 1, microbatches, ranks, microbatches, multiply_factor=1)
        stage = lambda step, rank=rank: rank  # noqa: E731
        theirs[rank] = schedules._get_1f1b_rank_ops(
            1, ranks, ahead, microbatches - ahead, ahead, rank, forward_stage_index=stage, backward_stage_index=stage
        )

    ours = generate("1f1b", ranks=ranks, microbatches=microbatches)

    assert cells(ours) == torch_cells(theirs)


@SIZES
def test_zb_h1_is_torchs_with_one_stage_a_rank(ranks: int, microbatches: int):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = object.__new__(schedules.ScheduleInterleavedZeroBubble)
    theirs.n_local_stages, theirs.pp_group_size, theirs._n_microbatches = 1, ranks, microbatches
    theirs.microbatches_per_round = microbatches // max(1, microbatches // ranks)

    ours = generate("zb_h1", ranks=ranks, microbatches=microbatches)

    assert cells(ours) == torch_cells({r: theirs._calculate_single_rank_operations(r) for r in range(ranks)})


@pytest.mark.parametrize(
    ("ranks", "microbatches", "interleave"), [(2, 4, 2), (4, 8, 3), (4, 10, 2), (4, 3, 2), (3, 3, 4)]
)
def test_interleaved_1f1b_is_torchs(ranks: int, microbatches: int, interleave: int):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = object.__new__(schedules.ScheduleInterleaved1F1B)
    theirs.n_local_stages, theirs.pp_group_size, theirs._n_microbatches = interleave, ranks, microbatches
    theirs.microbatches_per_round = microbatches // max(1, microbatches // ranks)

    ours = generate("interleaved_1f1b", ranks=ranks, microbatches=microbatches, interleave=interleave)

    assert cells(ours) == torch_cells({r: theirs._calculate_single_rank_operations(r) for r in range(ranks)})


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 3), (5, 14)])
def test_zbv_is_torchs(ranks: int, microbatches: int):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = object.__new__(schedules.ScheduleZBVZeroBubble)
    theirs.pp_group_size, theirs.num_stages, theirs._n_microbatches = ranks, 2 * ranks, microbatches

    ours = generate("zbv", ranks=ranks, microbatches=microbatches)

    assert cells(ours) == torch_cells({r: theirs._calculate_single_rank_operations(r) for r in range(ranks)})
