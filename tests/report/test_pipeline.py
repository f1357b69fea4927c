"""A pipeline's timeline as text and as a trace."""

from __future__ import annotations

import json

import pytest

from autopar.api.overlapping import pipeline_spans
from autopar.ir.pipeline import StageCost, equal_stages
from autopar.ir.timeline import Timeline
from autopar.report.schedule_picture import schedule_picture
from autopar.report.trace import trace
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate

STAGE = StageCost(forward_s=0.01, input_gradient_s=0.01, weight_gradient_s=0.01, activation_bytes=100)


def timeline(name: str, ranks: int, microbatches: int, transfer_s: float = 0.0) -> Timeline:
    schedule = generate(name, ranks=ranks, microbatches=microbatches)
    return simulate(schedule, equal_stages(schedule.stages, STAGE, forward_s=transfer_s, backward_s=transfer_s))


def test_1f1b_as_a_picture():
    assert schedule_picture(timeline("1f1b", 2, 3)) == (
        "rank 0  F0-F1-......B0----F2-B1----...B2----  bubble 25%\n"
        "rank 1  ...F0-B0----F1-B1----F2-B2----......  bubble 25%\n"
        "1 column = 3.33 ms, F forward, B backward, . idle; step 120 ms, bubble 25.0%\n"
    )


def test_ranks_with_several_stages_show_them():
    picture = schedule_picture(timeline("zbv", 2, 3), width=200)

    assert "0F0" in picture
    assert "3F0" in picture
    assert "I input gradient, W weight gradient" in picture


@pytest.mark.parametrize("width", [1, 7, 40, 120])
@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b"])
def test_time_takes_at_most_the_width_and_all_rows_are_as_long(width: int, name: str):
    lines = schedule_picture(timeline(name, 3, 30, transfer_s=0.004), width).splitlines()[:-1]

    assert len(lines) == 3
    assert {len(line.split("  ")[1]) for line in lines} == {width}


def test_where_nothing_takes_time_the_picture_says_so():
    still = StageCost(forward_s=0.0, input_gradient_s=0.0, weight_gradient_s=0.0)

    picture = schedule_picture(simulate(generate("gpipe", ranks=1, microbatches=1), equal_stages(1, still)))

    assert picture == "nothing takes any time\n"


def test_the_trace_has_every_action_of_every_rank_with_its_microseconds():
    drawn = json.loads(trace(pipeline_spans(timeline("1f1b", 2, 2, transfer_s=0.001))))["traceEvents"]

    tracks = {(each["pid"], each.get("tid")): each["args"]["name"] for each in drawn if each["ph"] == "M"}
    assert tracks == {
        (0, None): "rank 0", (0, 0): "compute", (0, 1): "to 1",
        (1, None): "rank 1", (1, 0): "compute", (1, 1): "to 0",
    }  # fmt: skip
    spans = {(each["pid"], each["name"]): each for each in drawn if each["ph"] == "X"}
    assert set(spans) == {
        *((rank, f"{kind} of stage {rank}, micro-batch {m}") for rank in (0, 1) for kind in _KINDS for m in (0, 1)),
        *((0, f"send of the activation of stage 0, micro-batch {m}") for m in (0, 1)),
        *((1, f"send of the gradient of stage 1, micro-batch {m}") for m in (0, 1)),
    }
    first = spans[1, "forward of stage 1, micro-batch 0"]
    assert (first["tid"], first["ts"], first["dur"]) == (0, pytest.approx(11_000), pytest.approx(10_000))
    assert spans[0, "send of the activation of stage 0, micro-batch 0"]["tid"] == 1


_KINDS = ("forward", "backward")
