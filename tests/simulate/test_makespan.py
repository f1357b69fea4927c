"""Simulated makespans and peaks equal the closed forms of `cost_models.pipeline`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.simulate.generators import names
from cost_models.errors import CostModelError
from cost_models.pipeline import IN_FLIGHT, MAKESPANS, bubble_fraction, in_flight, makespan_s
from tests.simulate.pipelines import UNIT_BYTES, interleaves, run

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 20)
SECONDS = st.floats(0.1, 3.0)


def closed_form(name: str, ranks: int, microbatches: int, interleave: int, f: float, i: float, w: float) -> float:
    return float(
        makespan_s(
            name,
            ranks=ranks,
            microbatches=microbatches,
            forward_s=f,
            input_gradient_s=i,
            weight_gradient_s=w,
            interleave=interleave,
        )
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
@given(ranks=RANKS, microbatches=MICROBATCHES, f=SECONDS, i=SECONDS, w=SECONDS, data=st.data())
def test_makespan_is_the_closed_form(
    name: str, ranks: int, microbatches: int, f: float, i: float, w: float, data: st.DataObject
):
    interleave = data.draw(st.sampled_from(interleaves(name)))

    simulated_s = run(name, ranks, microbatches, interleave, f=f, i=i, w=w).makespan_s

    assert simulated_s == pytest.approx(closed_form(name, ranks, microbatches, interleave, f, i, w), rel=1e-9)


@given(ranks=RANKS, groups=st.integers(1, 4), interleave=st.integers(1, 4), f=SECONDS, b=SECONDS)
def test_the_interleaved_form_is_megatrons_where_ranks_divide_micro_batches(
    ranks: int, groups: int, interleave: int, f: float, b: float
):
    microbatches = groups * ranks

    form_s = closed_form("interleaved_1f1b", ranks, microbatches, interleave, f, b, 0.0)

    assert form_s == pytest.approx(microbatches * (f + b) + (ranks - 1) * (f + b) / interleave, rel=1e-9)


@given(ranks=RANKS, microbatches=MICROBATCHES, f=SECONDS, i=SECONDS, w=SECONDS)
def test_zb_h1_is_the_closed_form_from_as_many_micro_batches_as_ranks(
    ranks: int, microbatches: int, f: float, i: float, w: float
):
    simulated_s = run("zb_h1", ranks, microbatches, f=f, i=i, w=w).makespan_s
    form_s = closed_form("zb_h1", ranks, microbatches, 1, f, i, w)

    assert simulated_s >= form_s * (1 - 1e-9)
    if microbatches >= ranks:
        assert simulated_s == pytest.approx(form_s, rel=1e-9)


@given(ranks=RANKS, microbatches=MICROBATCHES, f=SECONDS, i=SECONDS, w=SECONDS)
def test_zbv_is_never_below_its_closed_form_and_reaches_it_for_equal_parts(
    ranks: int, microbatches: int, f: float, i: float, w: float
):
    simulated_s = run("zbv", ranks, microbatches, f=f, i=i, w=w).makespan_s
    equal_s = run("zbv", ranks, microbatches, f=f, i=f, w=f).makespan_s

    assert simulated_s >= closed_form("zbv", ranks, microbatches, 2, f, i, w) * (1 - 1e-9)
    if microbatches >= 2 * ranks - 1:
        assert equal_s == pytest.approx(closed_form("zbv", ranks, microbatches, 2, f, f, f), rel=1e-9)


@pytest.mark.parametrize("name", ["zb_h1", "zbv"])
@given(
    ranks=st.integers(2, 8),
    microbatches=st.integers(2, 20),
    f=SECONDS,
    i_of_f=st.floats(0.8, 1.25),
    w_of_f=st.floats(0.8, 1.25),
)
def test_zero_bubble_is_shorter_than_1f1b_within_its_memory(
    name: str, ranks: int, microbatches: int, f: float, i_of_f: float, w_of_f: float
):
    seconds = {"f": f, "i": f * i_of_f, "w": f * w_of_f}

    zero_bubble, one_f_one_b = run(name, ranks, microbatches, **seconds), run("1f1b", ranks, microbatches, **seconds)

    assert zero_bubble.makespan_s < one_f_one_b.makespan_s
    assert zero_bubble.bubble_fraction < one_f_one_b.bubble_fraction
    assert zero_bubble.peak_bytes <= one_f_one_b.peak_bytes


@pytest.mark.parametrize("name", names())
@given(ranks=RANKS, microbatches=MICROBATCHES, data=st.data())
def test_peak_memory_is_the_closed_form_of_micro_batches_in_flight(
    name: str, ranks: int, microbatches: int, data: st.DataObject
):
    interleave = data.draw(st.sampled_from(interleaves(name)))

    timeline = run(name, ranks, microbatches, interleave)

    for number, rank in enumerate(timeline.ranks):
        held = in_flight(name, ranks=ranks, microbatches=microbatches, rank=number, interleave=interleave)
        bound = float(held) * (UNIT_BYTES // interleave)
        assert rank.peak_bytes <= bound
        if name != "zbv" or microbatches >= 2 * ranks - 1:
            assert rank.peak_bytes == bound


@given(ranks=RANKS, microbatches=MICROBATCHES, f=SECONDS, i=SECONDS, w=SECONDS)
def test_bubble_fraction_is_the_simulated_one(ranks: int, microbatches: int, f: float, i: float, w: float):
    form = bubble_fraction(
        "1f1b",
        ranks=ranks,
        microbatches=microbatches,
        forward_s=f,
        input_gradient_s=i,
        weight_gradient_s=w,
    )

    assert run("1f1b", ranks, microbatches, f=f, i=i, w=w).bubble_fraction == pytest.approx(float(form), abs=1e-9)


def test_every_named_schedule_has_its_formulas():
    assert tuple(MAKESPANS) == tuple(IN_FLIGHT) == names()


def test_a_schedule_without_closed_form_is_told():
    with pytest.raises(CostModelError) as caught:
        in_flight("zb_h2", ranks=2, microbatches=2, rank=0)

    assert "no closed form for schedule 'zb_h2'" in str(caught.value)
    assert "zb_h1" in str(caught.value)
