"""Placements of rows in an order of their rank's own: their text, and that nothing leads from or to them."""

from __future__ import annotations

import pytest

from autopar.ir.microbatches import joined, parted
from autopar.ir.placement import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    is_at_rest,
    is_valid,
    nest,
    parse_placement,
)
from autopar.ir.reshard import NoRouteError, is_reachable, route

OWN, FIRST, COUNTS, SENT = Shard(0, rows="own"), Shard(0, rows="first"), Partial("own"), Shard(0, rows="expert")


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (OWN, "Shard(0, own)"),
        (Shard(1, 4, "own"), "Shard(1, outer=4, own)"),
        (FIRST, "Shard(0, first)"),
        (COUNTS, "Partial(own)"),
        (SENT, "Shard(0, expert)"),
    ],
)
def test_the_text_of_a_placement_names_it(placement: Placement, text: str) -> None:
    assert str(placement) == text
    assert parse_placement(text) == placement


OTHERS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial(), OWN, FIRST, COUNTS]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("mine", [OWN, COUNTS])
def test_own_rows_stay(mine: Placement, other: Placement) -> None:
    if other == mine:
        assert route((mine,), (other,), (8, 8), (2,)) == ()
        return
    for before, after in (((mine,), (other,)), ((other,), (mine,))):
        assert not is_reachable(before, after)
        with pytest.raises(NoRouteError):
            route(before, after, (8, 8), (2,))


def test_first_rows_are_cut_of_all_of_them() -> None:
    assert [step.kind for step in route((Replicate(),), (FIRST,), (8,), (2,))] == ["slice"]
    assert not any(is_reachable((each,), (FIRST,)) for each in (Shard(0), Partial(), OWN))
    assert not any(is_reachable((FIRST,), (each,)) for each in (Shard(0), Partial(), Replicate()))


def test_other_axes_move_beside_own_rows() -> None:
    before: Layout = (OWN, Partial())
    after: Layout = (OWN, Shard(0, 2))
    assert [step.kind for step in route(before, after, (8, 8), (2, 2))] == ["reduce_scatter"]


def test_own_rows_nest_and_lie_within_micro_batches_as_others() -> None:
    assert nest((OWN, OWN, Shard(0)), (2, 2, 2)) == (OWN, Shard(0, 2, "own"), Shard(0, 4))
    assert joined(Shard(0), (OWN,), 4) == (Shard(0), Shard(0, 4, "own"))
    assert parted((Shard(0), Shard(0, 4, "own")), 4) == (Shard(0), (OWN,))
    assert not is_at_rest((OWN,), (2,))


def kinds(before: Layout, after: Layout) -> list[tuple[str, int]]:
    return [(step.kind, step.axis) for step in route(before, after, (64, 8), (2,) * len(before))]


def test_own_rows_go_to_their_experts_and_back() -> None:
    assert kinds((OWN,), (SENT,)) == kinds((SENT,), (OWN,)) == [("all_to_all", 0)]
    assert kinds((COUNTS,), (SENT,)) == [("all_gather", 0)]
    assert kinds((OWN, Shard(0, 2, "own")), (OWN, Shard(0, 2, "expert"))) == [("all_to_all", 1)]


@pytest.mark.parametrize("other", [Replicate(), Shard(0), Shard(1), Partial(), FIRST])
def test_rows_of_experts_go_nowhere_else(other: Placement) -> None:
    assert not is_reachable((SENT,), (other,))
    assert not is_reachable((other,), (SENT,))
    assert not is_reachable((SENT,), (COUNTS,))
    assert not is_reachable((Shard(1, rows="own"),), (Shard(1, rows="expert"),))


def test_no_other_axis_splits_rows_of_experts() -> None:
    assert is_valid((64, 8), (OWN, Shard(0, 2, "expert")), (2, 2))
    assert is_valid((64, 8), (SENT, Shard(1)), (2, 2))
    assert not is_valid((64, 8), (SENT, Shard(0, 2)), (2, 2))
    assert kinds((OWN, Shard(0, 2)), (SENT, Replicate())) == [("all_gather", 1), ("all_to_all", 0)]
    assert kinds((SENT, Replicate()), (OWN, Shard(0, 2))) == [("all_to_all", 0), ("slice", 1)]
