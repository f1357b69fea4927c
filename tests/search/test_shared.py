"""Bounds of pipelines on unlike devices against all cuts, orders and recomputations, simulated."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations, product
from math import inf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.ir.pipeline import Edge, PipelineCosts, StageCost
from autopar.ir.schedule import PipelineSchedule
from autopar.search.fluid import Fluid
from autopar.search.shared import Ranks, least_shared_s
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate
from tests.search.test_fluid import programs

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zbv", 2)]


def slower(blocks: Fluid, times: float) -> Fluid:
    names = ("forward_s", "input_gradient_s", "weight_gradient_s", "again_s")
    return replace(blocks, **{name: times * getattr(blocks, name) for name in names})


def run(
    on: list[Fluid], schedule: PipelineSchedule, cut: tuple[int, ...], ways: tuple[int, ...]
) -> tuple[float, list[int]]:
    """Return seconds of one cut with one recomputation, and the bytes of each rank; `on` are blocks on its device."""
    stages = []
    for stage, (start, stop) in enumerate(zip(cut, (*cut[1:], len(ways)), strict=True)):
        blocks, part, way = on[schedule.rank_of[stage]], np.arange(start, stop), list(ways[start:stop])
        stages.append(
            StageCost(
                forward_s=float(blocks.forward_s[part].sum()),
                input_gradient_s=float((blocks.input_gradient_s[part] + blocks.again_s[part, way]).sum()),
                weight_gradient_s=float(blocks.weight_gradient_s[part].sum()),
                static_bytes=int(blocks.static_bytes[part].sum()),
                activation_bytes=int(blocks.saved_bytes[part, way].sum()),
                kept_bytes=int(blocks.late_bytes[part].sum()),
            )
        )
    edges = tuple(Edge(stage, stage + 1, 0.0, 0.0) for stage in range(len(stages) - 1))
    timeline = simulate(schedule, PipelineCosts(tuple(stages), edges))
    return timeline.makespan_s, [rank.peak_bytes for rank in timeline.ranks]


@pytest.mark.parametrize(("name", "interleave"), SCHEDULES)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), blocks=programs(4), microbatches=st.integers(1, 4))
def test_no_cut_order_and_recomputation_beats_the_bound(
    name: str, interleave: int, data: st.DataObject, blocks: Fluid, microbatches: int
):
    ranks = data.draw(st.integers(1, max(1, len(blocks.counts) // interleave)))
    assume(ranks * interleave <= len(blocks.counts))
    fast = data.draw(st.integers(0, ranks))
    other, budgets = slower(blocks, data.draw(st.integers(2, 4))), data.draw(st.tuples(*[st.integers(1, 60)] * 2))
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=interleave)
    kinds = [(Ranks(blocks, fast, budgets[0])), Ranks(other, ranks - fast, budgets[1])]
    best_s = inf
    count = len(blocks.counts)
    for order in set(permutations([0] * fast + [1] * (ranks - fast))):
        for cut, ways in product(combinations(range(1, count), schedule.stages - 1), product(range(3), repeat=count)):
            step_s, held = run([kinds[kind].blocks for kind in order], schedule, (0, *cut), ways)
            if all(each <= budgets[kind] for each, kind in zip(held, order, strict=True)):
                best_s = min(best_s, step_s)

    bound_s = least_shared_s([each for each in kinds if each.count], microbatches)

    assert bound_s <= best_s + 1e-9


def test_ranks_share_the_work_by_what_they_take_for_it():
    """Ten blocks of 4 s on the one, 1 s on the other: eight on the fast one take as long as two on the slow one."""
    ones, none = np.ones(10), np.zeros((10, 1))
    blocks = Fluid(ones.astype(np.int64), ones, 0 * ones, 0 * ones, none, none, 0 * ones, 0.1 * ones)
    slow = slower(blocks, 4.0)

    assert least_shared_s([Ranks(blocks, 1, 1.0), Ranks(slow, 1, 1.0)], 3) == pytest.approx(24.0, rel=1e-5)
    assert least_shared_s([Ranks(blocks, 1, 0.5), Ranks(slow, 1, 1.0)], 3) == pytest.approx(60.0, rel=1e-5)
    assert least_shared_s([Ranks(blocks, 1, 0.5), Ranks(slow, 1, 0.4)], 3) == inf


def test_a_micro_batch_passes_all_blocks_on_whatever_devices():
    """One of them, on ten ranks: nothing is shared."""
    ones, none = np.ones(10), np.zeros((10, 1))
    blocks = Fluid(ones.astype(np.int64), ones, 2 * ones, ones, none, none, 0 * ones, 0 * ones)

    assert least_shared_s([Ranks(blocks, 5, 1.0), Ranks(slower(blocks, 4.0), 5, 1.0)], 1) == pytest.approx(30, rel=1e-5)
