"""Ways of recomputing blocks: the cheapest that fit, against all of them."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.search.recomputing import Room, Ways, cheapest


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
