"""Garbage collection while a plan is made, and afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from autopar.api import planning
from autopar.api.collecting import seldom_collected
from autopar.errors import InfeasibleError
from tests.api.test_outer import cluster, planned


@pytest.fixture(autouse=True)
def _as_a_user_has_it() -> Iterator[None]:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    if frozen:
        gc.freeze()


def test_a_plan_leaves_collection_as_it_was_even_where_there_is_none(monkeypatch: pytest.MonkeyPatch):
    during = []

    def plan(_: planning.Planner) -> None:
        during.append((gc.get_threshold()[0], gc.get_freeze_count()))
        raise InfeasibleError("nothing fits")

    monkeypatch.setattr(planning.Planner, "plan", plan)
    with pytest.raises(InfeasibleError):
        planned(cluster())

    [(threshold, frozen)] = during
    assert threshold > 700
    assert frozen > 1000
    assert (gc.get_threshold(), gc.get_freeze_count()) == ((700, 10, 10), 0)


def test_who_turned_collection_off_keeps_that():
    gc.set_threshold(0)

    with seldom_collected():
        assert gc.get_threshold()[0] == 0
        assert gc.get_freeze_count() == 0
    assert gc.get_threshold()[0] == 0


def test_who_froze_objects_keeps_that():
    frozen: list[object] = []
    assert _looked_at(frozen)
    gc.freeze()  # how many are frozen afterwards is no answer: that falls with each of them that is let go

    with seldom_collected():
        assert gc.get_threshold()[0] > 700
        assert not _looked_at(frozen)
    assert not _looked_at(frozen)


def test_who_collects_as_seldom_is_left_alone():
    gc.set_threshold(50_000, 20, 20)

    with seldom_collected():
        assert gc.get_threshold() == (50_000, 20, 20)
        assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == (50_000, 20, 20)


def test_cycles_are_still_found():
    class Ring:
        alive = 0

        def __init__(self) -> None:
            self.own = self
            Ring.alive += 1

        def __del__(self) -> None:
            Ring.alive -= 1

    with seldom_collected():
        for _ in range(120_000):
            Ring()
        assert Ring.alive < 120_000


def _looked_at(item: object) -> bool:
    """Whether collection may look at `item`: what is frozen is not listed."""
    return any(each is item for each in gc.get_objects())
