"""A token that goes to each node once is sent as often as its experts are on different nodes."""

from __future__ import annotations

import itertools

import pytest

from cost_models.exchanges import sent_share


@pytest.mark.parametrize(("nodes", "chosen"), [(2, 1), (2, 2), (4, 3), (3, 4)])
def test_the_share_is_the_mean_over_all_placements_of_experts(nodes: int, chosen: int):
    placements = list(itertools.product(range(nodes), repeat=chosen))
    distinct = sum(len(set(each)) for each in placements) / len(placements)

    assert sent_share(nodes, chosen) == pytest.approx(distinct / chosen)


def test_on_one_node_every_copy_is_its_own_and_groups_bound_the_nodes():
    assert sent_share(1, 8) == 1.0
    assert sent_share(8, 8, groups=8, reached=4) == pytest.approx(4 * (1 - 0.75**8) / 8)
    assert sent_share(8, 8, groups=4, reached=2) == sent_share(8, 8)
