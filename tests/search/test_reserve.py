"""Memory that an assignment leaves to who recomputes less: against all assignments and amounts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.search.fitting import solve
from autopar.search.ilp import Limits
from autopar.search.recomputing import Ways
from autopar.search.reserve import reserving, worth
from tests.search.test_ilp import make_table, seconds


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(1.5, 5.0))
def test_the_fastest_assignment_with_what_it_leaves_is_found(seed: int, budget: float):
    rng = np.random.default_rng(seed)
    table = make_table(rng, nodes=4, groups=2)
    amounts, spared_s = np.array([0.0, 0.5, 1.5]), np.cumsum(rng.random(3))
    every = itertools.product(*(range(node.options) for node in table.nodes))
    known = []
    for options in every:
        held, step_s = float(table.memory_curve(options, []).max()), seconds(table, options)
        known += [
            step_s + float(spared_s.max() - spared) for more, spared in zip(amounts, spared_s, strict=True)
            if held + more <= budget and np.isfinite(step_s)
        ]  # fmt: skip
    assume(known)

    found = solve(reserving(table, amounts, spared_s), Limits(budget))

    assert found.objective_s == pytest.approx(min(known), rel=1e-6)
    assert found.peak_bytes <= budget + 1e-9


def test_memory_is_worth_what_spares_most_for_it_first():
    """Two blocks: nothing recomputed of the first spares 4 s for 2 bytes, a part 3 s for 1; of the second 2 s for 4."""
    ways = Ways(np.array([[0.0, 1.0, 4.0], [0.0, 0.0, 2.0]]), np.array([[2.0, 1.0, 0.0], [4.0, 4.0, 0.0]]))

    amounts, spared_s = worth(ways, np.array([1.0, 2.0]), 100.0)

    assert list(zip(amounts, spared_s, strict=True)) == [(0.0, 0.0), (1.0, 3.0), (2.0, 4.0), (10.0, 6.0)]
    assert list(worth(ways, np.array([1.0, 2.0]), 9.0)[0]) == [0.0, 1.0, 2.0]
