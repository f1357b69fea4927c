"""Bounds of pipelines against all cuts and recomputations, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.ir.pipeline import Edge, PipelineCosts, StageCost
from autopar.ir.schedule import PipelineSchedule
from autopar.search.fluid import Flow, Fluid, Handing, Tight, least_of_one_s, least_step_s
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate
from autopar.simulate.paths import Paths

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zbv", 2)]


@st.composite
def programs(draw: st.DrawFn, most: int = 5) -> Fluid:
    """Blocks of whole seconds and bytes, each a kind of its own, that can be recomputed in two ways or not."""
    count = draw(st.integers(2, most))

    def numbers(high: int, columns: int = 1) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        drawn = draw(st.lists(st.integers(0, high), min_size=count * columns, max_size=count * columns))
        return np.array(drawn, dtype=np.float64).reshape(count, columns)

    again, saved = numbers(4, 3), np.sort(numbers(9, 3), axis=1)[:, ::-1]
    again[:, 0] = 0.0
    own = [numbers(5)[:, 0] for _ in range(3)]
    return Fluid(np.ones(count, dtype=np.int64), *own, again, saved, numbers(4)[:, 0], numbers(4)[:, 0])


def run(
    blocks: Fluid,
    schedule: PipelineSchedule,
    cut: tuple[int, ...],
    ways: tuple[int, ...],
    hops_s: Sequence[float] = (),
    host_s: float = 0.0,
) -> tuple[float, int]:
    """Return seconds and the largest rank's bytes of one cut with one recomputation.

    `hops_s` are of handing a value to the next rank, or back, by the rank that comes first; `host_s` is what either
    side's core spends on it.
    """
    place = np.arange(len(ways))
    stops = (*cut[1:], len(ways))
    own = np.array(ways)

    def total(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], start: int, stop: int) -> float:
        return float(values[start:stop].sum())

    again, saved = blocks.again_s[place, own], blocks.saved_bytes[place, own]
    away = [one != other for one, other in pairwise(schedule.rank_of)]
    handled = [host_s * sum(each) for each in zip([0, *away], [*away, 0], strict=True)]
    stages = tuple(
        StageCost(
            forward_s=total(blocks.forward_s, start, stop) + by_host_s,
            input_gradient_s=total(blocks.input_gradient_s + again, start, stop) + by_host_s,
            weight_gradient_s=total(blocks.weight_gradient_s, start, stop),
            static_bytes=int(total(blocks.static_bytes, start, stop)),
            activation_bytes=int(total(saved, start, stop)),
            kept_bytes=int(total(blocks.late_bytes, start, stop)),
        )
        for start, stop, by_host_s in zip(cut, stops, handled, strict=True)
    )
    seconds = [hops_s[min(pair)] if hops_s else 0.0 for pair in pairwise(schedule.rank_of)]
    edges = tuple(Edge(stage, stage + 1, hop_s, hop_s) for stage, hop_s in enumerate(seconds))
    timeline = simulate(schedule, PipelineCosts(stages, edges))
    return timeline.makespan_s, max(rank.peak_bytes for rank in timeline.ranks)


def all_runs(
    blocks: Fluid, schedule: PipelineSchedule, hops_s: Sequence[float] = (), host_s: float = 0.0
) -> list[tuple[float, int]]:
    count = len(blocks.counts)
    cuts = [(0, *rest) for rest in combinations(range(1, count), schedule.stages - 1)]
    every = product(range(blocks.again_s.shape[1]), repeat=count)
    return [run(blocks, schedule, cut, ways, hops_s, host_s) for ways in every for cut in cuts]


@pytest.mark.parametrize(("name", "interleave"), SCHEDULES)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), blocks=programs(4), microbatches=st.integers(1, 5))
def test_no_cut_and_recomputation_beats_the_bound(
    name: str, interleave: int, data: st.DataObject, blocks: Fluid, microbatches: int
):
    ranks = data.draw(st.integers(1, len(blocks.counts) // interleave))
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=interleave)
    known = all_runs(blocks, schedule)
    assume(max(held for _, held in known) > 0)
    budget = data.draw(st.integers(max(1, min(held for _, held in known)), max(held for _, held in known)))

    flow, tight = Flow.of(schedule), Tight(Paths(schedule), inf)
    bound_s = least_step_s(blocks, flow, microbatches, budget)
    tight_s = least_step_s(blocks, flow, microbatches, budget, tight=tight)

    assert bound_s <= tight_s <= min(step_s for step_s, held in known if held <= budget) + 1e-9


@pytest.mark.parametrize(("name", "interleave"), SCHEDULES)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), blocks=programs(4), microbatches=st.integers(1, 5))
def test_no_cut_whose_values_are_handed_from_rank_to_rank_beats_the_bound(
    name: str, interleave: int, data: st.DataObject, blocks: Fluid, microbatches: int
):
    ranks = data.draw(st.integers(2, max(2, len(blocks.counts) // interleave)))
    assume(ranks * interleave <= len(blocks.counts))
    # The last goes from the last rank to the first, where stages go round.
    hops_s = data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    handing = Handing(min(hops_s), max(hops_s[:-1]), sum(hops_s[:-1]), data.draw(st.integers(0, 3)))
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=interleave)
    known = all_runs(blocks, schedule, hops_s, handing.host_s)
    assume(max(held for _, held in known) > 0)

    flow, tight, budget = Flow.of(schedule), Tight(Paths(schedule), inf), max(held for _, held in known)
    bound_s = least_step_s(blocks, flow, microbatches, budget, handing=handing)
    tight_s = least_step_s(blocks, flow, microbatches, budget, handing=handing, tight=tight)

    assert bound_s <= tight_s <= min(step_s for step_s, _ in known) + 1e-9
    assert bound_s >= 2 * handing.path_s * (1 - 1e-6)


def test_a_schedule_whose_computations_wait_for_one_another_is_bounded_by_that():
    """Of equal blocks, input gradients take three times as long as the others: bubbles that no row of work knows."""
    ones = np.ones(3)
    blocks = Fluid(np.array([1, 6, 1]), ones, 3 * ones, ones, np.zeros((3, 1)), np.zeros((3, 1)), ones * 0, ones)
    schedule = generate("zbv", ranks=2, microbatches=4, interleave=2)
    apart = replace(blocks, **_each(blocks))
    best_s = min(run(apart, schedule, (0, *inner), (0,) * 8)[0] for inner in combinations(range(1, 8), 3))

    loose_s = least_step_s(blocks, Flow.of(schedule), 4, 100.0)
    tight_s = least_step_s(blocks, Flow.of(schedule), 4, 100.0, tight=Tight(Paths(schedule), inf))
    enough_s = least_step_s(blocks, Flow.of(schedule), 4, 100.0, tight=Tight(Paths(schedule), loose_s))

    assert 1.05 * loose_s < tight_s <= best_s
    assert enough_s == loose_s


def _each(blocks: Fluid) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Return the parts of blocks that are a kind of their own each."""
    names = ("forward_s", "input_gradient_s", "weight_gradient_s", "again_s", "saved_bytes", "late_bytes")
    parts = {name: np.repeat(getattr(blocks, name), blocks.counts, axis=0) for name in (*names, "static_bytes")}
    return {**parts, "counts": np.ones(blocks.counts.sum(), dtype=np.int64)}


def test_what_two_ranks_hand_over_one_after_another_bounds_even_what_nobody_computes():
    nothing = np.zeros(4)
    blocks = Fluid(
        np.ones(4, dtype=np.int64), nothing, nothing, nothing, np.zeros((4, 1)), np.ones((4, 1)), *[nothing] * 2
    )
    flow = Flow.of(generate("1f1b", ranks=4, microbatches=8))

    bound_s = least_step_s(blocks, flow, 8, 100.0, handing=Handing(1.0, 5.0, 7.0, 0.5))

    # On its way and back, a value passes two hosts for each of three boundaries.
    assert bound_s == pytest.approx(7 * 5.0 + 2 * 7.0 + 2 * 3 * 2 * 0.5, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(blocks=programs(), microbatches=st.integers(1, 9), budget=st.integers(1, 60))
def test_on_one_rank_the_bound_is_that_of_blocks_recomputed_in_parts(blocks: Fluid, microbatches: int, budget: int):
    flow = Flow.of(generate("1f1b", ranks=1, microbatches=microbatches))

    bound_s = least_step_s(blocks, flow, microbatches, budget)

    room = budget - blocks.static_bytes.sum()
    if blocks.saved_bytes.min(axis=1).sum() > room:
        assert bound_s == inf
        return
    work_s = (blocks.forward_s + blocks.input_gradient_s + blocks.weight_gradient_s).sum()
    assert bound_s == pytest.approx(microbatches * (work_s + _knapsack_s(blocks, room)), rel=1e-5, abs=1e-6)


def _knapsack_s(blocks: Fluid, room: float) -> float:
    """Return the least seconds of recomputation by its dual: the best of all prices of a byte is one where ways tie."""
    again, saved = blocks.again_s, blocks.saved_bytes
    ties = {0.0}
    for one, other in combinations(range(again.shape[1]), 2):
        fewer = saved[:, one] - saved[:, other]
        ties |= {float(s / b) for s, b in zip(again[:, other] - again[:, one], fewer, strict=True) if b and s / b > 0}
    return max(float((again + price * saved).min(axis=1).sum() - price * room) for price in ties)


def test_memory_that_is_tighter_never_lowers_the_bound_and_what_cannot_fit_has_none():
    ones, again, saved = np.ones(3), np.outer(np.ones(3), [0.0, 1.0]), np.outer(np.ones(3), [5.0, 1.0])
    blocks = Fluid(np.array([1, 6, 1]), ones, ones, ones, again, saved, ones, ones)
    flow = Flow.of(generate("1f1b", ranks=4, microbatches=8))

    bounds = [least_step_s(blocks, flow, 8, budget) for budget in (100, 42, 32, 22, 12, 5)]

    assert bounds == sorted(bounds)
    assert 8 * 2 * 3.0 < bounds[0] <= (8 + 3) * 2 * 3.0  # work alone, and even stages with the textbook's bubble
    assert bounds[0] < bounds[3] < inf
    assert bounds[-1] == inf


def test_seconds_that_nobody_knows_the_block_of_count_on_all_ranks_together():
    ones = np.ones(2)
    blocks = Fluid(np.array([1, 1]), ones, ones, ones, np.zeros((2, 1)), np.zeros((2, 1)), ones * 0, ones)
    flow = Flow.of(generate("gpipe", ranks=1, microbatches=4))

    more_s = least_step_s(replace(blocks, elsewhere_s=0.5), flow, 4, 10.0)

    assert more_s == pytest.approx(least_step_s(blocks, flow, 4, 10.0) + 4 * 0.5, rel=1e-5)


def test_programs_of_too_many_kinds_are_bound_by_nothing():
    many = np.linspace(1, 2, 200)
    blocks = Fluid(np.ones(200, dtype=np.int64), many, many, many, many[:, None] * 0, many[:, None], many, many)

    assert least_step_s(blocks, Flow.of(generate("1f1b", ranks=64, microbatches=64)), 64, 1e9) == 0.0


@settings(max_examples=60, deadline=None)
@given(seconds=st.lists(st.integers(0, 9), min_size=1, max_size=7), ranks=st.integers(1, 4))
def test_no_share_out_of_whole_blocks_leaves_the_busiest_rank_less(seconds: list[int], ranks: int):
    loads = (
        max(sum(each for each, taker in zip(seconds, takers, strict=True) if taker == rank) for rank in range(ranks))
        for takers in product(range(ranks), repeat=len(seconds))
    )

    assert max(max(seconds), sum(seconds) if ranks == 1 else 0) <= least_of_one_s(np.array(seconds), ranks)
    assert least_of_one_s(np.array(seconds), ranks) <= min(loads)


@pytest.mark.parametrize(("counts", "busiest"), [((1, 1, 1), 12.0), ((1, 7, 1), 9.0)])
def test_one_block_is_not_shared_by_ranks(counts: tuple[int, ...], busiest: float):
    """Of three blocks, one takes 12 s of 14; nine of 3, 3 and 1 s are three a rank, or more of the short ones."""
    seconds = np.array([1.0, 12.0, 1.0]) if counts[1] == 1 else np.array([3.0, 3.0, 1.0])
    none = np.zeros((3, 1))
    blocks = Fluid(np.array(counts), seconds, 0 * seconds, 0 * seconds, none, none, 0 * seconds, 0 * seconds)

    bound_s = least_step_s(blocks, Flow.of(generate("1f1b", ranks=3, microbatches=100)), 100, 1.0)

    assert 100 * busiest <= bound_s < 100 * busiest + 20
