"""What estimates know of stages: blocks cannot be halved."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.rough import busiest_share


@pytest.mark.parametrize(("layers", "stages", "share"), [(96, 60, 2 / 96), (96, 48, 2 / 96), (96, 20, 5 / 96)])
def test_equal_layers_go_to_stages_whole(layers: int, stages: int, share: float):
    assert busiest_share((1.0,) * layers, stages) == pytest.approx(share)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8), st.data())
def test_the_busiest_stage_has_as_little_as_any_cut_leaves_it(works: list[float], data: st.DataObject):
    stages = data.draw(st.integers(1, len(works)))
    cuts = combinations(range(1, len(works)), stages - 1)
    least = min(max(sum(works[a:b]) for a, b in zip((0, *cut), (*cut, len(works)), strict=True)) for cut in cuts)

    assert busiest_share(tuple(works), stages) == pytest.approx(least / sum(works), rel=1e-6)
