"""Figures as people read them."""

from __future__ import annotations

import pytest

from autopar.figures import format_figure, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234, "1.23 s"), (0.0456, "45.6 ms"), (7.8e-6, "7.8 us"), (0.0, "0 s"), (1.36e-20, "0 s"), (-1e-21, "0 s")],
)
def test_seconds_have_the_unit_of_their_size_and_rounding_is_nothing(seconds: float, text: str):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (4.5e-6, "s", "4.5 us"),
        (1.2345e10, "B/s", "12.35 GB/s"),
        (3.1e12, "FLOP/s", "3.1 TFLOP/s"),
        (0.8, "cores", "0.8 cores"),
    ],
)
def test_a_figure_of_the_cost_model_has_the_prefix_that_suits_its_size(value: float, unit: str, text: str):
    assert format_figure(value, unit) == text
