"""Ways of recomputing blocks: the cheapest that fit, against all of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.search.recomputing import Room, Ways, cheapest, share_of_seconds


@st.composite
def _instances(draw: st.DrawFn) -> tuple[Ways, list[Room], float]:
    blocks, count = draw(st.integers(1, 4)), 3
    number = st.integers(0, 20)
    seconds = np.array([[draw(number) for _ in range(count)] for _ in range(blocks)], dtype=float)
    kept = np.array([[draw(st.integers(-3, 20)) for _ in range(count - 1)] + [0] for _ in range(blocks)], dtype=float)
    rooms = [
        Room(float(draw(number)), np.array([draw(st.integers(0, 3)) for _ in range(blocks)], dtype=float))
        for _ in range(draw(st.integers(1, 4)))
    ]
    return Ways(seconds, kept), rooms, float(draw(st.integers(0, 100)))


def _fits(ways: Ways, rooms: list[Room], budget: float, chosen: tuple[int, ...] | list[int]) -> bool:
    kept = ways.kept_bytes[np.arange(len(chosen)), list(chosen)]
    return all(room.held_bytes + room.copies @ kept <= budget for room in rooms)


@given(_instances())
def test_the_cheapest_ways_that_fit_are_found(instance: tuple[Ways, list[Room], float]):
    ways, rooms, budget = instance
    blocks, count = ways.seconds.shape
    fitting = [
        sum(ways.seconds[block, way] for block, way in enumerate(chosen))
        for chosen in product(range(count), repeat=blocks)
        if _fits(ways, rooms, budget, chosen)
    ]

    found = cheapest(ways, rooms, budget)

    if any(room.held_bytes > budget for room in rooms) or not fitting:
        assert found is None
    else:
        assert found is not None
        assert _fits(ways, rooms, budget, found)
        assert sum(ways.seconds[block, way] for block, way in enumerate(found)) <= min(fitting) * (1 + 1e-3) + 1e-9


@given(_instances(), st.floats(0.0, 1.0))
def test_no_choice_that_frees_as_much_takes_less_than_the_share_of_seconds(
    instance: tuple[Ways, list[Room], float], share: float
):
    """Choices that free at least that share, against blocks in parts: these take no more, and next to as much."""
    given_ways = instance[0]
    blocks, count = given_ways.seconds.shape
    # Recomputing all takes longest and keeps least, recomputing nothing is the other way round.
    seconds = np.sort(given_ways.seconds - given_ways.seconds.min(axis=1, keepdims=True), axis=1)
    kept = -np.sort(-given_ways.kept_bytes, axis=1)
    ways = Ways(seconds, kept)
    total, freed = seconds[:, -1].sum(), kept[:, 0] - kept[:, -1]

    found = share_of_seconds(ways, share)

    takes = [
        sum(seconds[block, way] for block, way in enumerate(chosen))
        for chosen in product(range(count), repeat=blocks)
        if sum(kept[block, 0] - kept[block, way] for block, way in enumerate(chosen)) >= share * freed.sum() - 1e-9
    ]
    assert 0.0 <= found <= 1.0
    assert found * total <= min(takes) + 1e-9
    assert min(takes) <= found * total + seconds[:, -1].max() + 1e-9


def test_what_holds_much_and_takes_little_is_recomputed_first():
    cheap_first = Ways(np.array([[0.0, 1.0, 10.0]]), np.array([[8.0, 2.0, 0.0]]))

    assert [share_of_seconds(cheap_first, share) for share in (0.0, 0.375, 0.75, 1.0)] == pytest.approx(
        [
            0.0,
            0.05,
            0.1,
            1.0,
        ]
    )
    assert share_of_seconds(Ways(np.zeros((1, 2)), np.zeros((1, 2))), 0.5) == 0.0
