"""What is moved of parameters and gradients, in bounds: against every way to hold and move them, block by block."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.table import Floats
from autopar.search.fluid import Flow, Fluid, least_step_s
from autopar.search.moved import Moved
from autopar.simulate.generators import generate

BLOCKS = 3


@st.composite
def programs(draw: st.DrawFn) -> Fluid:
    """Blocks of whole seconds and bytes, each a kind of its own, that can be recomputed or not."""

    def numbers(high: int) -> Floats:
        return np.array(draw(st.lists(st.integers(0, high), min_size=BLOCKS, max_size=BLOCKS)), dtype=np.float64)

    none = np.zeros(BLOCKS)
    again, saved = np.stack([none, numbers(6)], axis=1), np.stack([numbers(6) + 4, numbers(4)], axis=1)
    moved = Moved(*(numbers(5) for _ in fields(Moved)))
    own = [numbers(5) for _ in range(3)]
    return Fluid(np.ones(BLOCKS, dtype=np.int64), *own, again, saved, none, numbers(2), moved=moved)


def on_one_rank(blocks: Fluid, microbatches: int, choices: tuple[tuple[int, int, int], ...]) -> tuple[float, float]:
    """Return seconds and bytes where each block recomputes, gathers anew and reduces early, or does not."""
    way, anew, early = np.array(choices).T
    place, moved = np.arange(BLOCKS), blocks.moved
    assert moved is not None
    work = blocks.forward_s + blocks.input_gradient_s + blocks.weight_gradient_s + blocks.again_s[place, way]
    shown = moved.shown_s + anew * moved.again_shown_s + early * moved.each_shown_s
    link = moved.link_s + anew * moved.again_link_s + early * moved.each_link_s
    once_s = float(((1 - np.maximum(anew, early)) * moved.link_s).sum())
    busy_s = microbatches * float(work.sum())
    hidden_s = max(0.0, once_s - float(work.sum()))  # behind one micro-batch alone
    step_s = max(busy_s + float(shown.sum()), busy_s + hidden_s, float(link.sum()), float(moved.across_s.sum()))
    held = blocks.static_bytes + blocks.saved_bytes[place, way]
    held = held + (1 - anew) * moved.whole_bytes + (1 - early) * moved.sums_bytes
    return step_s + float(moved.optimizer_s.sum()), float(held.sum())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), blocks=programs(), microbatches=st.integers(2, 4))
def test_no_way_to_hold_and_move_them_beats_the_bound(data: st.DataObject, blocks: Fluid, microbatches: int):
    every = product(product(range(2), repeat=3), repeat=BLOCKS)
    known = [on_one_rank(blocks, microbatches, choices) for choices in every]
    budget = data.draw(st.integers(1, int(max(held for _, held in known)) + 1))
    fitting = [step_s for step_s, held in known if held <= budget]
    flow = Flow.of(generate("1f1b", ranks=1, microbatches=2, interleave=1))

    bound_s = least_step_s(blocks, flow, microbatches, budget)
    nothing_s = least_step_s(replace(blocks, moved=None), flow, microbatches, budget)

    assert nothing_s <= bound_s + 1e-9
    assert bound_s <= min(fitting, default=inf) + 1e-9


@pytest.mark.parametrize(("budget", "bound_s"), [(40, 7.0), (30, 8.5), (22, 11.0), (12, 16.0), (11, inf)])
def test_what_has_no_room_for_whole_parameters_and_sums_moves_more(budget: int, bound_s: float):
    """Three blocks on one rank: 6 s of work, 1 s of moving once; 4 bytes a block whole, 4 of sums, 4 of the rest."""
    each, none = np.ones(3), np.zeros(3)
    moved = Moved(none, each / 3, none, none, 4 * each, each, none, 4 * each, 2 * each, none)
    blocks = Fluid(
        np.ones(3, dtype=np.int64), each / 2, each / 2, none, none[:, None], none[:, None], none, 4 * each, moved=moved
    )
    flow = Flow.of(generate("1f1b", ranks=1, microbatches=2, interleave=1))

    found = least_step_s(blocks, flow, 2, budget)

    assert found == pytest.approx(bound_s, rel=1e-5)


def test_two_ranks_hold_and_move_those_of_their_own_blocks():
    """Two blocks on two ranks: each moves one; a ninth of it is gathered anew where its rank has room for all."""
    each, none = np.ones(2), np.zeros(2)
    moved = Moved(none, none, 9 * each, none, 4 * each, none, 9 * each, none, none, 9 * each)
    blocks = Fluid(
        np.ones(2, dtype=np.int64), each, each, none, none[:, None], none[:, None], none, 4 * each, moved=moved
    )
    flow = Flow.of(generate("1f1b", ranks=2, microbatches=2, interleave=1))

    roomy, tight, nothing = (least_step_s(blocks, flow, 2, budget) for budget in (8, 4, 3))

    assert roomy == pytest.approx(10, rel=1e-5)
    assert tight == pytest.approx(18, rel=1e-5)
    assert nothing == inf
