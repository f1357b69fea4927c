"""Cuts into pipeline stages against all cuts there are, and against the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.schedule import PipelineSchedule
from autopar.search import interleaved
from autopar.search.cuts import Cuts, NoCut, find_cuts, find_cuts_on, pipeline_costs
from autopar.search.stages import Assigned, Boundary, Unit
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate

ONE_STAGE = ("gpipe", "1f1b", "zb_h1")
WHOLE = st.integers(0, 6)
AMPLE = 1e15

LAYER = Unit(
    forward_s=1.0,
    input_gradient_s=1.0,
    weight_gradient_s=1.0,
    static_bytes=10,
    activation_bytes=4,
    temporary_bytes=1,
)
FREE = Boundary(forward_s=0.0, backward_s=0.0)


@st.composite
def units(draw: st.DrawFn) -> Unit:
    seconds = st.integers(1, 12).map(lambda each: each / 4)
    return Unit(
        forward_s=draw(seconds),
        input_gradient_s=draw(seconds),
        weight_gradient_s=draw(seconds),
        static_bytes=draw(WHOLE),
        activation_bytes=draw(WHOLE),
        kept_bytes=draw(st.none() | WHOLE),
        temporary_bytes=draw(WHOLE),
    )


@st.composite
def boundaries(draw: st.DrawFn) -> Boundary:
    seconds = st.integers(0, 8).map(lambda each: each / 4)
    return Boundary(
        forward_s=draw(seconds),
        backward_s=draw(seconds),
        value_bytes=draw(WHOLE),
        allowed=draw(st.sampled_from((True, True, True, False))),
    )


@st.composite
def programs(draw: st.DrawFn, least: int, most: int = 9) -> tuple[list[Unit], list[Boundary]]:
    count = draw(st.integers(least, most))
    made = [draw(boundaries()) for _ in range(count - 1)]
    if sum(each.allowed for each in made) < least - 1:
        made = [Boundary(forward_s=e.forward_s, backward_s=e.backward_s, value_bytes=e.value_bytes) for e in made]
    return [draw(units()) for _ in range(count)], made


def all_cuts(edges: list[Boundary], stages: int) -> Iterator[tuple[int, ...]]:
    places = [at + 1 for at, edge in enumerate(edges) if edge.allowed]
    yield from ((0, *chosen) for chosen in itertools.combinations(places, stages - 1))


def step_s(
    program: list[Unit], edges: list[Boundary], schedule: PipelineSchedule, first_units: tuple[int, ...], blocking: bool
) -> float:
    """The closed form once more, stage by stage as in the table of `closed_forms`."""
    p, m, v = schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks
    fill, keys = 0.0, [0.0] * schedule.stages
    for stage, (start, stop) in enumerate(zip(first_units, (*first_units[1:], len(program)), strict=True)):
        f = sum(unit.forward_s for unit in program[start:stop])
        i = sum(unit.input_gradient_s for unit in program[start:stop])
        w = sum(unit.weight_gradient_s for unit in program[start:stop])
        t = f + i + w
        rank_of = schedule.rank_of
        ahead = edges[start - 1] if stage and rank_of[stage - 1] != rank_of[stage] else FREE
        behind = edges[stop - 1] if stop < len(program) and rank_of[stage + 1] != rank_of[stage] else FREE
        x, z = ahead.forward_s + ahead.backward_s, ahead.backward_s + behind.forward_s
        g = max(f, i, f + i - w)
        fill_s, work, e = {
            "gpipe": (t + x, (m - 1) * t, max(0, behind.forward_s - f) + max(0, ahead.backward_s - i - w)),
            "1f1b": (t + x, (m - 1) * t, x * (p - 1) / p),
            "zb_h1": (g + (x if blocking else 2 * x), m * t - g, max(0, x - w) * (p - 1) / p),
            "interleaved_1f1b": (t / v + x, (m - 1 / v) * t, max(0, x - t) / 2),
            "zbv": ((f if stage < p - 1 else 0) + x, m * t, max(0, x - t) / 2),
        }[schedule.name]
        if schedule.name == "interleaved_1f1b" and m < p:
            fill_s, work = t + x, (m - 1) * t
        fill += fill_s
        keys[stage] = work + (m - 1) * (z if blocking else e)
    if schedule.name == "interleaved_1f1b" and m < p:
        return fill + max(keys)
    return fill + max(
        sum(key for key, owner in zip(keys, schedule.rank_of, strict=True) if owner == rank) for rank in range(p)
    )


def peaks(
    program: list[Unit], edges: list[Boundary], schedule: PipelineSchedule, first_units: tuple[int, ...]
) -> tuple[int, ...]:
    timeline = simulate(schedule, pipeline_costs(program, edges, schedule, first_units))
    return tuple(rank.peak_bytes for rank in timeline.ranks)


@pytest.mark.parametrize("name", ONE_STAGE)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), microbatches=st.integers(1, 6), blocking=st.booleans())
def test_no_cut_within_the_budget_is_better_than_the_one_found(
    name: str, data: st.DataObject, ranks: int, microbatches: int, blocking: bool
):
    program, edges = data.draw(programs(ranks))
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=1)
    known = {
        cut: (step_s(program, edges, schedule, cut, blocking), peaks(program, edges, schedule, cut))
        for cut in all_cuts(edges, ranks)
    }
    least, most = min(max(each) for _, each in known.values()), max(max(each) for _, each in known.values())
    budget = data.draw(st.integers(least - 1, most))

    found = find_cuts(program, edges, schedule, budget_bytes=budget, blocking=blocking)

    if budget < least:
        assert found == NoCut(least, least)
        return
    assert isinstance(found, Cuts)
    assert found.proven
    assert found.cuts[0].step_s == pytest.approx(min(s for s, held in known.values() if max(held) <= budget), rel=1e-9)
    assert len({cut.first_units for cut in found.cuts}) == len(found.cuts) <= 10
    for cut in found.cuts:
        seconds, held = known[cut.first_units]
        assert (cut.step_s, cut.rank_bytes) == (pytest.approx(seconds, rel=1e-9), held)
        assert max(held) <= budget


@pytest.mark.parametrize("few", [0, interleaved._FEW])
@pytest.mark.parametrize(("name", "interleave"), [("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zbv", 2)])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 3), microbatches=st.integers(1, 6), blocking=st.booleans())
def test_with_several_stages_a_rank_few_cuts_are_all_tried_and_of_many_the_best_is_within_the_gap(
    name: str, interleave: int, few: int, data: st.DataObject, ranks: int, microbatches: int, blocking: bool
):
    stages = ranks * interleave
    program, edges = data.draw(programs(stages, max(9, stages + 1)))
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=interleave)
    known = {
        cut: (step_s(program, edges, schedule, cut, blocking), peaks(program, edges, schedule, cut))
        for cut in all_cuts(edges, stages)
    }
    least, most = min(max(each) for _, each in known.values()), max(max(each) for _, each in known.values())
    budget = data.draw(st.integers(least - 1, most))

    with patch.object(interleaved, "_FEW", few):
        found = find_cuts(program, edges, schedule, budget_bytes=budget, blocking=blocking)

    if few:
        assert found.proven if isinstance(found, Cuts) else found == NoCut(least, least)
        assert isinstance(found, Cuts) == (budget >= least)
    if isinstance(found, NoCut):
        assert found.bound_bytes <= least <= found.least_bytes
        assert found.least_bytes > budget
        return
    best_s = min(seconds for seconds, held in known.values() if max(held) <= budget)
    assert found.bound_s <= best_s * (1 + 1e-9)
    assert found.cuts[0].step_s * (1 - found.gap) <= best_s * (1 + 1e-9)
    for cut in found.cuts:
        seconds, held = known[cut.first_units]
        assert (cut.step_s, cut.rank_bytes) == (pytest.approx(seconds, rel=1e-9), held)
        assert max(held) <= budget


@pytest.mark.parametrize("name", ONE_STAGE)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), microbatches=st.integers(1, 6), blocking=st.booleans())
def test_the_best_of_all_stage_counts_is_the_best_of_all_their_cuts(
    name: str, data: st.DataObject, microbatches: int, blocking: bool
):
    program, edges = data.draw(programs(4, 7))
    schedules = [generate(name, ranks=ranks, microbatches=microbatches, interleave=1) for ranks in range(1, 5)]
    known = [
        (step_s(program, edges, schedule, cut, blocking), max(peaks(program, edges, schedule, cut)))
        for schedule in schedules
        for cut in all_cuts(edges, schedule.stages)
    ]
    budget = data.draw(st.integers(min(held for _, held in known), max(held for _, held in known)))

    found = [find_cuts(program, edges, schedule, budget_bytes=budget, blocking=blocking) for schedule in schedules]

    best = min(each.cuts[0].step_s for each in found if isinstance(each, Cuts))
    assert best == pytest.approx(min(seconds for seconds, held in known if held <= budget), rel=1e-9)


def test_what_messages_take_from_a_core_is_part_of_the_computations_at_both_ends():
    edge = Boundary(forward_s=0.0, backward_s=0.0, host_s=0.25)
    inside = generate("interleaved_1f1b", ranks=1, microbatches=2, interleave=3)
    across = generate("1f1b", ranks=3, microbatches=2)

    alone, sent = (pipeline_costs([LAYER] * 3, [edge] * 2, each, (0, 1, 2)).stages for each in (inside, across))

    assert [each.forward_s for each in alone] == [1.0, 1.0, 1.0]
    assert [each.forward_s for each in sent] == [1.25, 1.5, 1.25]
    assert [each.input_gradient_s for each in sent] == [1.25, 1.5, 1.25]
    assert [each.weight_gradient_s for each in sent] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("slow_s", [3.0, 12.0, 40.0])
def test_beside_a_slow_link_the_best_of_the_cuts_is_about_the_best_of_all_there_are(name: str, slow_s: float):
    program, ranks, slow = [LAYER] * 12, 4, 2
    schedule = generate(name, ranks=ranks, microbatches=16, interleave=1)
    fast = [Boundary(forward_s=0.01, backward_s=0.01)] * 11
    links = fast, [Boundary(forward_s=slow_s / 2, backward_s=slow_s / 2)] * 11
    link_of = tuple(int(stage == slow) for stage in range(ranks))
    assigned = Assigned((program,), links, (0,) * ranks, link_of, (0,) * ranks)

    def simulated_s(first_units: tuple[int, ...]) -> float:
        edges = list(fast)
        edges[first_units[slow] - 1] = links[1][0]
        return simulate(schedule, pipeline_costs(program, edges, schedule, first_units)).makespan_s

    found = find_cuts_on(assigned, schedule, budget_bytes=AMPLE)

    assert isinstance(found, Cuts)
    best_s = min(simulated_s(cut) for cut in all_cuts(fast, ranks))
    assert min(simulated_s(cut.first_units) for cut in found.cuts) <= 1.03 * best_s
