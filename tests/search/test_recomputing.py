"""Ways of recomputing blocks: the cheapest that fit, against all of them."""

from __future__ import annotations

import multiprocessing
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


def _deep_mixture(dense: bool) -> None:
    """Solve what 56 equal blocks keep in 97 moments, each of which holds a beginning of them; room is in 10 MB."""
    free = [
        3828, 3710, 3705, 3700, 3695, 3690, 3685, 3680, 3562, 3557, 3552, 3547, 3542, 3536, 3531, 3526, 3408, 3403,
        3398, 3393, 3388, 3383, 3378, 3260, 3255, 3250, 3245, 3240, 3234, 3229, 3224, 3106, 3101, 3096, 3091, 3086,
        3081, 3076, 2953, 2948, 2943, 2938, 2933, 2927, 2922, 2917, 2808, 2446, 2460, 2475, 2378, 2394, 2409, 2425,
        2441, 2456, 2472, 2488, 2390, 2406, 2422, 2437, 2453, 2469, 2484, 2387, 2403, 2418, 2434, 2450, 2465, 2481,
        2497, 2399, 2415, 2431, 2446, 2462, 2478, 2494, 2396, 2412, 2427, 2443, 2459, 2474, 2490, 2506, 2408, 2424,
        2440, 2455, 2471, 2487, 2503, 2405, 2421,
    ]  # fmt: skip
    counts = [*range(10, 57), *range(55, 5, -1)]
    seconds, kept = [0.0, 1.4, 7.4, 2.2, 37.4, 38.4, 39.2], [4180e6, 4180e6, 2435e6, 4178e6, 220e6, 102e6, 0.0]
    ways = Ways(np.tile(seconds, (56, 1)) / 1e3, np.tile(kept, (56, 1)))
    rooms = [Room(77e9 - 1e7 * left, (np.arange(56) < count) * 1.0) for left, count in zip(free, counts, strict=True)]
    if dense:  # one block keeps less than nothing in a way that nobody takes: no moment implies another then
        ways.kept_bytes[0, 1] = -1.0
        ways.seconds[0, 1] = 1.0
    chosen = cheapest(ways, rooms, 77e9)
    assert chosen is not None
    assert _fits(ways, rooms, 77e9, chosen)


@pytest.mark.parametrize("dense", [False, True], ids=["few moments bind", "all are told"])
def test_deep_models_of_equal_blocks_are_solved_in_time(dense: bool):
    """HiGHS 1.16's presolve never came back from these rows, of Mixtral 8x22B on 64 H100, whatever its time limit."""
    solving = multiprocessing.get_context("spawn").Process(target=_deep_mixture, args=(dense,), daemon=True)
    solving.start()
    solving.join(120.0)
    ended = solving.exitcode
    solving.kill()

    assert ended == 0
