"""Figures as people read them."""

from __future__ import annotations

import pytest

from autopar.figures import format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234, "1.23 s"), (0.0456, "45.6 ms"), (7.8e-6, "7.8 us"), (0.0, "0 s"), (1.36e-20, "0 s"), (-1e-21, "0 s")],
)
def test_seconds_have_the_unit_of_their_size_and_rounding_is_nothing(seconds: float, text: str):
    assert format_seconds(seconds) == text
