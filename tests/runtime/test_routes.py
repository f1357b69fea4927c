"""The order of messages between pipeline ranks."""

from __future__ import annotations

import pytest

from autopar.errors import ScheduleError
from autopar.ir.schedule import Action, PipelineSchedule
from autopar.runtime.routes import Routes, forward_only, routes
from autopar.simulate.generators import generate, names
from tests.support.chain import Transfer


def transfers(stages: int, skips: tuple[tuple[int, int], ...] = ()) -> list[Transfer]:
    pairs = [(stage, stage + 1) for stage in range(stages - 1)] + list(skips)
    forward = [Transfer(f"h{a}-{b}", a, b, "forward", (1,)) for a, b in pairs]
    return forward + [Transfer(f"g{b}-{a}", b, a, "backward", (1,)) for a, b in pairs]


def drains(every: list[Routes]) -> bool:
    """Return whether all ends where each rank has one channel and every message waits for both of its ends."""
    position = [0] * len(every)
    head = [0] * len(every)
    done: set[Action] = set()
    arrived: set[int] = set()
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(every):
            while position[rank] < len(own.row):
                if any(message.tag not in arrived for message in own.receives[position[rank]]):
                    break
                done.add(own.row[position[rank]])
                position[rank] += 1
                moved = True
            if head[rank] < len(own.order):
                message = own.order[head[rank]]
                other = message.target_rank if message.source_rank == rank else message.source_rank
                meets = every[other].order[head[other]] is message or (
                    every[other].order[head[other]].tag == message.tag
                )
                if message.source in done and meets:
                    arrived.add(message.tag)
                    head[rank] += 1
                    head[other] += 1
                    moved = True
    return all(at == len(own.row) for at, own in zip(position, every, strict=True))


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", names())
def test_one_channel_a_rank_without_buffers_never_waits_in_a_circle(name: str, ranks: int, microbatches: int):
    schedule = generate(name, ranks=ranks, microbatches=microbatches)
    skips = ((0, schedule.stages - 1),) if schedule.stages > 2 else ()
    for each in (schedule, forward_only(schedule)):
        every = [routes(each, transfers(schedule.stages, skips), rank) for rank in range(ranks)]

        assert drains(every)


def test_a_schedule_without_an_action_that_exchanges_tensors_is_refused():
    schedule = PipelineSchedule.from_csv("0F0,0B0\n1F0\n")

    with pytest.raises(ScheduleError, match="no backward of stage 1, micro-batch 0"):
        routes(schedule, transfers(2), 0)


def test_ranks_that_would_wait_forever_are_named():
    schedule = PipelineSchedule.from_csv("0B0,0F0\n1F0,1B0\n")

    with pytest.raises(ScheduleError, match="2 pipeline ranks would wait forever: 0B0 waits for 1B0"):
        routes(schedule, transfers(2), 0)
