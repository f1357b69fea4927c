"""A plan's timeline as a trace, and its exposed seconds beside measured ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.ir.plan import Plan, Span
from autopar.report.exposed import compare, comparison, plan_note
from autopar.report.trace import plan_trace
from autopar.runtime.profiling import Recorded, document

GATHER = "all_gather up.weight @dp_shard forward"


@pytest.fixture
def timed_plan(small_plan: Plan) -> Plan:
    """The small plan, whose gather of up.weight is exposed for 5 us."""
    timeline = (
        Span(name=GATHER, stream="dp_shard", start_s=0.0, end_s=1e-5, exposed_s=5e-6, kind=0),
        Span(name="forward layers.0", stream="compute", start_s=0.0, end_s=5e-6),
        Span(name=f"wait {GATHER}", stream="compute", start_s=5e-6, end_s=1e-5),
    )
    first, *rest = small_plan.decisions.collectives
    decisions = replace(small_plan.decisions, collectives=(replace(first, exposed_s=5e-6), *rest))
    return replace(small_plan, decisions=decisions, estimates=replace(small_plan.estimates, timeline=timeline))


def measured(plan: Plan) -> str:
    """Return two measured steps, in which the gather is exposed for 3 us of issue and 7 us of waiting each."""
    seen = []
    for at in (100.0, 200.0):
        seen += [
            Recorded(f"autopar: issue {GATHER}", at, at + 3),
            Recorded("gloo:all_gather", at + 4, at + 30),
            Recorded("autopar: forward layers.0", at + 3, at + 20),
            Recorded("aten::mm", at + 4, at + 19),
            Recorded(f"autopar: wait {GATHER}", at + 20, at + 27),
        ]
    return document(seen, rank=1, steps=2, streams={GATHER: "dp_shard"}, plan=plan_note(plan))


def spans(text: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the first span of each track and name: microseconds from and how many."""
    events = json.loads(text)["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for each in events:
        if each["ph"] == "X":
            found.setdefault((tracks[each["tid"]], each["name"]), (each["ts"], round(each["dur"], 6)))
    return found


def test_the_predicted_and_the_measured_trace_name_tracks_and_collectives_alike(timed_plan: Plan):
    predicted, seen = spans(plan_trace(timed_plan)), spans(measured(timed_plan))

    assert set(predicted) <= set(seen)
    assert predicted["dp_shard", GATHER] == (0.0, 10.0)
    assert seen["dp_shard", GATHER] == (4.0, 26.0)
    assert seen["compute", f"issue {GATHER}"] == (0.0, 3.0)


def test_exposed_seconds_are_compared_a_step_largest_error_first(timed_plan: Plan, tmp_path: Path):
    (tmp_path / "rank1.json").write_text(measured(timed_plan))

    found = compare(timed_plan, tmp_path)

    assert (found[0].name, found[0].predicted_s) == (GATHER, 5e-6)
    assert found[0].measured_s == pytest.approx(10e-6)
    assert [each.error_s for each in found] == sorted((each.error_s for each in found), reverse=True)
    assert comparison(timed_plan, tmp_path).splitlines()[1].split()[-3:] == ["us", "5", "us"]


def test_a_measured_collective_that_the_plan_does_not_know_is_shown_as_such(timed_plan: Plan, tmp_path: Path):
    (tmp_path / "rank0.json").write_text(measured(timed_plan).replace("up.weight", "down.weight"))

    assert "all_gather down.weight @dp_shard forward" in comparison(timed_plan, tmp_path)
    assert "not in the plan" in comparison(timed_plan, tmp_path)


def test_a_profile_of_another_plan_is_refused_and_other_predictions_of_one_are_compared(
    timed_plan: Plan, slower_plan: Plan, tmp_path: Path
):
    (tmp_path / "rank0.json").write_text(measured(timed_plan))
    estimates = replace(timed_plan.estimates, peak_memory_bytes=1)

    assert compare(replace(timed_plan, estimates=estimates), tmp_path) == compare(timed_plan, tmp_path)
    with pytest.raises(
        UsageError, match=r"was measured on another plan \(dp_shard=2 x tp=4 of .*measure this one with"
    ):
        comparison(replace(slower_plan, estimates=timed_plan.estimates), tmp_path)


def test_what_cannot_be_drawn_or_compared_says_why(small_plan: Plan, timed_plan: Plan, tmp_path: Path):
    with pytest.raises(UsageError, match="the plan holds no timeline"):
        plan_trace(small_plan)
    with pytest.raises(
        UsageError, match=r"holds no profile \(no rank\*.json\); write one with `autopar run PLAN --prof"
    ):
        compare(timed_plan, tmp_path)
    (tmp_path / "rank0.json").write_text("{}")
    with pytest.raises(UsageError, match="is no profile that `autopar run --profile` wrote"):
        compare(timed_plan, tmp_path)
