"""What messages between pipeline ranks take at least, against all orders of the ranks."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest

from autopar.api.crossings import joining, least_handing, levels
from cost_models.cluster import ClusterSpec
from cost_models.collectives import collective_s


@pytest.mark.parametrize("sizes", [(1,), (2,)])
@pytest.mark.parametrize("preset", ["h100-sxm-80gb:4x3", "h100-sxm-80gb:2x3", "a100-sxm-80gb:6x1", "a100-sxm-80gb:1x6"])
def test_no_order_of_the_ranks_hands_on_in_less(preset: str, sizes: tuple[int, ...]):
    spec = ClusterSpec.parse(preset)
    depth, nbytes = len(spec.devices) // sizes[0], 1e6
    whole = levels(spec, (depth, *sizes))
    between = {
        (one, other): float(collective_s("point_to_point", nbytes, joining(whole, one, other).busy))
        for one, other in permutations(range(depth), 2)
    }

    least = least_handing(spec, depth, sizes, nbytes)

    assert least.least_s == pytest.approx(min(between.values()))
    if depth <= 7:  # all orders of more would take minutes
        steps = [[between[pair] for pair in pairwise(order)] for order in permutations(range(depth))]
        assert least.path_s == pytest.approx(min(map(sum, steps)))
        assert least.most_s == pytest.approx(min(map(max, steps)))
    in_place = [between[pair] for pair in pairwise(range(depth))]
    assert least.path_s == pytest.approx(sum(in_place))


def test_a_pipeline_of_one_rank_hands_nothing_on():
    least = least_handing(ClusterSpec.parse("cpu:2"), 1, (2,), 1e6)

    assert (least.least_s, least.most_s, least.path_s, least.host_s) == (0.0, 0.0, 0.0, 0.0)
