"""How rows of layers repeat, and which few of them stand for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.repetition import FEW, Repetition, repetition_of


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("a" * 10, Repetition(10)),
        ("ab" * 5, Repetition(5, period=2)),
        ("ddd" + "m" * 7, Repetition(7, before=3)),
        ("lllllg" * 4 + "ll", Repetition(4, period=6, behind=2)),
        ("g" + "llg" * 7, Repetition(7, period=3, behind=1)),
        ("aabb" * 3, None),
        ("aaa", None),
        ("", None),
    ],
)
def test_the_pattern_of_the_fewest_layers_is_found(kinds: str, found: Repetition | None):
    assert repetition_of(kinds) == found


@given(
    before=st.text("xyz", max_size=4),
    period=st.text("ab", min_size=1, max_size=5),
    times=st.integers(FEW + 1, 8),
    behind=st.text("xyz", max_size=4),
)
def test_what_is_kept_of_a_row_makes_the_whole_one_when_its_pattern_is_repeated(
    before: str, period: str, times: int, behind: str
):
    kinds = before + period * times + behind

    found = repetition_of(kinds)

    assert found is not None
    assert found.layers == len(kinds)
    assert found.few <= len(before) + FEW * len(period) + len(behind)
    kept = found.kept(kinds)
    assert len(kept) == found.few
    part = kept[found.before : found.before + found.period]
    assert [*kept[: found.before], *part * found.times, *kept[len(kept) - found.behind :]] == list(kinds)


def test_margins_belong_to_no_pattern():
    row = Repetition(9, period=2, before=1)

    wider = row.with_margins()

    assert wider == Repetition(7, period=2, before=3, behind=2)
    assert wider.layers == row.layers
