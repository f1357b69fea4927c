"""Orders of unlike blocks of ranks, with their cuts, against all orders and cuts there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.schedule import PipelineSchedule
from autopar.search import interleaved
from autopar.search.assignments import Kind, Order, Placed, find_placed, orders
from autopar.search.cuts import Cuts, NoCut, find_cuts_on, pipeline_costs
from autopar.search.stages import Assigned, Boundary, Unit
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate
from tests.search.test_cuts import LAYER, ONE_STAGE, all_cuts, programs, step_s

FREE = Boundary(forward_s=0.0, backward_s=0.0)


@dataclass(frozen=True)
class Instance:
    """A program and unlike blocks of ranks to run it on."""

    units: list[list[Unit]]
    """By kind of block."""

    boundaries: list[list[Boundary]]
    """By kind of link: the slower of the two kinds that it joins."""

    kind_of: tuple[int, ...]
    budgets: tuple[int, ...]
    """Bytes, by kind."""

    def links(self, order: Order, schedule: PipelineSchedule) -> list[int]:
        """Return the kind of the link ahead of each stage."""
        kinds = [self.kind_of[order[rank]] for rank in schedule.rank_of]
        return [0, *(max(pair) for pair in itertools.pairwise(kinds))]

    def assigned(self, order: Order, schedule: PipelineSchedule) -> Assigned:
        kinds = [self.kind_of[block] for block in order]
        return Assigned(
            units=tuple(self.units),
            boundaries=tuple(self.boundaries),
            device_of=tuple(kinds),
            link_of=tuple(self.links(order, schedule)),
            less_bytes=tuple(max(self.budgets) - self.budgets[kind] for kind in kinds),
        )

    def as_placed(
        self, order: Order, schedule: PipelineSchedule, cut: tuple[int, ...]
    ) -> tuple[list[Unit], list[Boundary]]:
        """Return the units as the ranks have them that a cut gives them to, and the boundaries as it crosses them."""
        count = len(self.units[0])
        edges, mine = list(self.boundaries[0]), []
        for stage, (start, stop) in enumerate(zip(cut, (*cut[1:], count), strict=True)):
            mine += self.units[self.kind_of[order[schedule.rank_of[stage]]]][start:stop]
            if stage:
                edges[start - 1] = self.boundaries[self.links(order, schedule)[stage]][start - 1]
        return mine, edges

    def fits(self, order: Order, schedule: PipelineSchedule, cut: tuple[int, ...]) -> bool:
        """Return whether a simulated run keeps to each rank's memory."""
        timeline = simulate(schedule, pipeline_costs(*self.as_placed(order, schedule, cut), schedule, cut))
        budgets = (self.budgets[self.kind_of[block]] for block in order)
        return all(rank.peak_bytes <= budget for rank, budget in zip(timeline.ranks, budgets, strict=True))

    def step_s(self, order: Order, schedule: PipelineSchedule, cut: tuple[int, ...]) -> float:
        return step_s(*self.as_placed(order, schedule, cut), schedule, cut, False)

    def search(self, schedule: PipelineSchedule, most: int = 100) -> list[Placed] | NoCut:
        def cuts_of(order: Order) -> Cuts | NoCut:
            return find_cuts_on(self.assigned(order, schedule), schedule, budget_bytes=max(self.budgets))

        kinds = [
            Kind(1 / sum(unit.forward_s for unit in units), budget)
            for units, budget in zip(self.units, self.budgets, strict=True)
        ]
        return find_placed(self.kind_of, kinds, cuts_of, most=most)

    def all_of(self, schedule: PipelineSchedule) -> Iterator[tuple[Order, tuple[int, ...]]]:
        """Yield every order of all blocks, equal ones told apart, and every cut."""
        for order in itertools.permutations(range(len(self.kind_of))):
            for cut in all_cuts(self.boundaries[0], schedule.stages):
                yield order, cut


@st.composite
def instances(draw: st.DrawFn, blocks: int, kinds: int) -> Instance:
    units, edges = draw(programs(blocks, 6))
    each = st.integers(1, 6).map(lambda rate: rate / 2)
    # Not one factor a kind: what is fast for one unit need not be for another.
    of_kind = [units]
    for _ in range(kinds - 1):
        slower = [(unit, draw(each), draw(each)) for unit in units]
        of_kind.append(
            [replace(u, forward_s=u.forward_s * f, weight_gradient_s=u.weight_gradient_s * w) for u, f, w in slower]
        )
    links = [edges]
    for _ in range(kinds - 1):
        links.append([replace(e, forward_s=e.forward_s * 2, backward_s=e.backward_s + draw(each)) for e in edges])
    kind_of = tuple(draw(st.integers(0, kinds - 1)) for _ in range(blocks))
    budgets = tuple(draw(st.integers(10, 150)) for _ in range(kinds))
    return Instance(of_kind, links, kind_of, budgets)


@pytest.mark.parametrize("name", ONE_STAGE)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=st.integers(2, 4), kinds=st.integers(2, 3), microbatches=st.integers(1, 5))
def test_no_order_and_cut_within_the_budgets_is_better_than_the_one_found(
    name: str, data: st.DataObject, ranks: int, kinds: int, microbatches: int
):
    given = data.draw(instances(ranks, kinds))
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=1)

    found = given.search(schedule)

    known = [
        given.step_s(order, schedule, cut) for order, cut in given.all_of(schedule) if given.fits(order, schedule, cut)
    ]
    if isinstance(found, NoCut):
        assert not known
        return
    best = found[0]
    assert sorted(best.order) == list(range(ranks))
    assert given.fits(best.order, schedule, best.cut.first_units)
    assert best.cut.step_s == pytest.approx(given.step_s(best.order, schedule, best.cut.first_units), rel=1e-9)
    assert best.cut.step_s == pytest.approx(min(known), rel=1e-9)


@pytest.mark.parametrize(("name", "interleave"), [("interleaved_1f1b", 2), ("zbv", 2)])
@settings(max_examples=15, deadline=None)
@given(data=st.data(), microbatches=st.integers(2, 4), few=st.sampled_from((10_000, 0)))
def test_with_several_stages_a_rank_what_is_found_fits_and_keeps_to_its_bound(
    name: str, interleave: int, data: st.DataObject, microbatches: int, few: int
):
    given = data.draw(instances(4, 2).map(lambda each: replace(each, kind_of=(0, 1))))
    schedule = generate(name, ranks=2, microbatches=microbatches, interleave=interleave)

    for order in ((0, 1), (1, 0)):
        with mock.patch.object(interleaved, "_FEW", few):
            cuts = find_cuts_on(given.assigned(order, schedule), schedule, budget_bytes=max(given.budgets))
        known = [
            given.step_s(order, schedule, cut)
            for cut in all_cuts(given.boundaries[0], schedule.stages)
            if given.fits(order, schedule, cut)
        ]
        if isinstance(cuts, NoCut):
            assert cuts.bound_bytes <= max(given.budgets) or not known
            continue
        assert all(given.fits(order, schedule, cut.first_units) for cut in cuts.cuts)
        assert cuts.bound_s <= min(known) * (1 + 1e-9)
        assert min(known) <= cuts.cuts[0].step_s * (1 + 1e-9)
        assert not few or cuts.cuts[0].step_s == pytest.approx(min(known), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_where_orders_are_many_the_one_found_is_no_worse_than_that_of_the_ranks(data: st.DataObject):
    given = data.draw(instances(4, 3).map(lambda each: replace(each, budgets=(10**6,) * 3)))
    schedule = generate("1f1b", ranks=4, microbatches=4, interleave=1)
    if orders(given.kind_of) <= 3:
        return
    tried: list[Order] = []

    def cuts_of(order: Order) -> Cuts | NoCut:
        tried.append(order)
        return find_cuts_on(given.assigned(order, schedule), schedule, budget_bytes=10**6)

    kinds = [Kind(1 / sum(unit.forward_s for unit in units), 10**6) for units in given.units]
    found = find_placed(given.kind_of, kinds, cuts_of, most=3)

    assert not isinstance(found, NoCut)
    as_given = cuts_of((0, 1, 2, 3))
    assert not isinstance(as_given, NoCut)
    assert found[0].cut.step_s <= as_given.cuts[0].step_s
    assert len(set(tried)) < 3 + 6  # six likely orders are always tried


def twelve(slower: Sequence[float]) -> list[list[Unit]]:
    return [[replace(LAYER, forward_s=x, input_gradient_s=x, weight_gradient_s=x) for _ in range(12)] for x in slower]


def test_devices_of_three_times_the_rate_take_three_times_the_layers():
    given = Instance(twelve((1.0, 3.0)), [[FREE] * 11] * 2, (1, 0), (10**6, 10**6))

    found = given.search(generate("1f1b", ranks=2, microbatches=16, interleave=1))

    assert not isinstance(found, NoCut)
    sizes = [stop - start for start, stop in itertools.pairwise((*found[0].cut.first_units, 12))]
    assert sorted(zip(found[0].order, sizes, strict=True)) == [(0, 3), (1, 9)]


def test_devices_with_little_memory_come_last_where_fewest_microbatches_wait():
    # In 1F1B the first of two ranks holds the activations of two micro-batches, the last those of one.
    given = Instance(twelve((1.0, 1.0)), [[FREE] * 11] * 2, (1, 0), (10**6, 6 * 10 + 6 * 4 + 1))

    found = given.search(generate("1f1b", ranks=2, microbatches=16, interleave=1))

    assert not isinstance(found, NoCut)
    assert (found[0].order, found[0].cut.first_units) == ((1, 0), (0, 6))


def test_equal_blocks_keep_the_order_of_their_ranks():
    given = Instance(twelve((1.0, 2.0)), [[FREE] * 11] * 2, (0, 1, 0, 1), (10**6, 10**6))

    found = given.search(generate("1f1b", ranks=4, microbatches=8, interleave=1))

    assert orders(given.kind_of) == 6
    assert not isinstance(found, NoCut)
    assert found[0].order.index(0) < found[0].order.index(2)
    assert found[0].order.index(1) < found[0].order.index(3)
