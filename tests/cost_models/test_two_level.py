from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.collectives import collective_s
from cost_models.library import catalogued_library
from cost_models.topology import Hop
from cost_models.two_level import TWO_LEVEL, pieces, splits, two_level_s

GLOO = catalogued_library("gloo")
FAST = Hop(4, 10e9, 0.0, "node", library=GLOO)
SLOW = Hop(2, 1e9, 0.0, "rack", library=GLOO)
N = 1e9


def test_an_all_reduce_sends_across_what_one_node_has_to_tell_the_other():
    """Two nodes of four: n inside and out, and 2 n (h - 1) / h across, at the four ranks' shares of the adapter."""
    inside_s, across_s = 2 * N * 3 / 4 / 10e9, 2 * (N / 4) / 2 / (1e9 / 4)

    assert two_level_s("all_reduce", N, (FAST, SLOW), 1) == pytest.approx(inside_s + across_s)
    assert collective_s("all_reduce", N, (FAST, SLOW)) == pytest.approx(2 * N * 7 / 8 / 1e9)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_gather_is_half_an_all_reduce(op):
    assert two_level_s(op, N, (FAST, SLOW), 1) == pytest.approx(two_level_s("all_reduce", N, (FAST, SLOW), 1) / 2)


def test_chunks_take_the_slower_level_and_one_chunk_of_the_other():
    inside_s, across_s = 2 * N * 3 / 4 / 10e9, 2 * (N / 4) / 2 / (1e9 / 4)

    assert two_level_s("all_reduce", N, (FAST, SLOW), 1, 10) == pytest.approx(across_s + inside_s / 10)


def test_on_two_nodes_of_two_it_pays_where_links_inside_are_twice_as_fast():
    """Flat: 3/2 n / B. In two levels: n / B across, n / b inside."""
    for times, pays in ((1.9, False), (2.1, True)):
        hops = (replace(FAST, ranks=2, bytes_per_s=times * 1e9), SLOW)
        assert (two_level_s("all_reduce", N, hops, 1) < collective_s("all_reduce", N, hops)) is pays


@given(
    op=st.sampled_from(TWO_LEVEL),
    size=st.floats(1, 1e11),
    ranks=st.lists(st.integers(1, 16), min_size=1, max_size=4),
    library=st.sampled_from(["gloo", "nccl"]),
)
def test_pieces_make_what_the_operation_makes(op, size, ranks, library):
    hops = [Hop(each, 1e10, 1e-6, f"{i}", library=catalogued_library(library)) for i, each in enumerate(ranks)]
    for inside in splits(op, hops):
        parts = pieces(op, size, hops, inside)
        crossed = [sum(each.hops[0].ranks == hop.ranks for each in parts) for hop in (hops[0], hops[inside])]

        assert all(crossed)
        assert max(each.full_bytes for each in parts) == size
        assert all(each.seconds >= 0.0 for each in parts)


def test_an_all_to_all_sends_the_same_bytes_across_in_fewer_messages():
    """16 nodes of four: 4 n / 64 to each of 60 ranks outside, or n / 16 to each of 15 nodes, from all four at once."""
    many = replace(SLOW, ranks=16)
    transfer_s = 4 * N * (1 - 4 / 64) / 1e9

    assert collective_s("all_to_all", N, (FAST, many)) == pytest.approx(transfer_s)
    assert two_level_s("all_to_all", N, (FAST, many), 1) == pytest.approx(transfer_s + N * 3 / 4 / 10e9)
    late = (replace(FAST, latency_s=1e-3), many)
    saved_s = collective_s("all_to_all", 1.0, late) - two_level_s("all_to_all", 1.0, late, 1)
    assert saved_s == pytest.approx(45e-3, rel=1e-3)


def test_a_broadcast_and_a_group_inside_a_node_have_no_form_in_two_levels():
    assert not list(splits("broadcast", (FAST, SLOW)))
    assert not list(splits("all_reduce", (FAST,)))
    with pytest.raises(ValueError, match="no form in two levels"):
        pieces("all_reduce", N, (FAST,), 1)
