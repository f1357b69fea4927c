import dataclasses
import math

import numpy as np
import pytest

from cost_models.cluster import ClusterSpec
from cost_models.collectives import FORMULAS, OPS, collective_s, collective_terms
from cost_models.errors import CostModelError
from cost_models.library import catalogued_library
from cost_models.topology import Hop

LINK = Hop(8, 300e9, 3e-6, "node", efficiency=0.8, call_s=20e-6)
SWITCH = dataclasses.replace(LINK, in_switch_reduction=True)
GLOO = catalogued_library("gloo")
NETWORK = Hop(4, 100e9, 10e-6, "rack", efficiency=0.9, call_s=25e-6)
GROUPS = {"node": (LINK,), "switch": (SWITCH,), "rack": (NETWORK,), "both": (SWITCH, NETWORK)}
SIZES = np.geomspace(1, 1e10, 41)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("hops", [(), (dataclasses.replace(LINK, ranks=1),)], ids=["no hop", "one rank"])
def test_a_group_of_one_rank_costs_nothing(op, hops):
    assert collective_s(op, 1e9, hops) == 0.0
    assert collective_terms(op, 1e9, hops).total_s == 0.0


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", GROUPS)
def test_doubling_the_bytes_doubles_the_transfer(op, group):
    algorithm = collective_terms(op, 1e9, GROUPS[group]).algorithm
    once, twice = (collective_terms(op, size, GROUPS[group], algorithm) for size in (1e9, 2e9))

    assert float(twice.transfer_s) == pytest.approx(2 * float(once.transfer_s), rel=1e-12)
    assert twice.latency_s == once.latency_s


@pytest.mark.parametrize("group", GROUPS)
def test_an_all_reduce_costs_at_least_an_all_gather_without_in_switch_reduction(group):
    hops = tuple(dataclasses.replace(hop, in_switch_reduction=False) for hop in GROUPS[group])
    for size in SIZES[SIZES > 1e6]:
        assert collective_s("all_reduce", size, hops) >= collective_s("all_gather", size, hops)


@pytest.mark.parametrize("hops", GROUPS.values(), ids=GROUPS)
def test_in_switch_reduction_saves_at_most_the_second_pass(hops):
    large = 1e9
    assert collective_s("all_reduce", large, hops) >= collective_s("all_gather", large, hops)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", GROUPS)
def test_time_grows_with_bytes(op, group):
    assert (np.diff(collective_s(op, SIZES, GROUPS[group])) >= 0).all()


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_auto_is_never_worse_than_one_flat_ring(op):
    hops = GROUPS["both"]
    assert (collective_s(op, SIZES, hops) <= collective_s(op, SIZES, hops, "ring")).all()


def test_an_all_gather_of_nccl_carries_all_but_one_part_across_the_adapters():
    node, rack = Hop(8, 450e9, 0.0, "node"), Hop(2, 100e9, 0.0, "rack")

    assert collective_s("all_gather", 1e9, (node, rack)) == pytest.approx(1e9 * 15 / 16 / 100e9)


@pytest.mark.parametrize(("ranks", "sent"), [(2, 1), (3, 1.5), (4, 2), (64, 2)])
def test_two_trees_send_the_message_twice_at_most(ranks, sent):
    hop = Hop(ranks, 1e9, 1e-6, "rack")
    expected = sent * 1e9 / (1e9 * catalogued_library("nccl").tree_efficiency)

    assert float(collective_terms("all_reduce", 1e9, (hop,), "tree").transfer_s) == pytest.approx(expected)


def test_the_fill_of_nccl_ends_at_a_multiple_of_the_latency():
    library = catalogued_library("nccl")
    small, large = (collective_terms("all_reduce", size, (LINK,), "tree") for size in (1e4, 1e10))

    assert float(small.fill_s) == pytest.approx(2 * library.chunk_fill * math.sqrt(small.latency_s * small.transfer_s))
    assert float(large.fill_s) == pytest.approx(library.fill_limit * large.latency_s)


def test_the_fill_of_gloo_grows_without_end():
    hop = dataclasses.replace(LINK, library=GLOO)
    terms = collective_terms("all_reduce", 1e10, (hop,), "ring")

    assert float(terms.fill_s) == pytest.approx(2 * math.sqrt(terms.latency_s * float(terms.transfer_s)))


def test_a_ring_of_few_bytes_takes_the_low_latency_protocol():
    assert collective_terms("all_gather", 1e3, (LINK,)).algorithm == "low_latency_ring"
    assert collective_terms("all_gather", 1e9, (LINK,)).algorithm == "ring"


@pytest.mark.parametrize(("cluster", "library"), [("cpu:4x2", "gloo"), ("h100-sxm-80gb:8x2", "nccl")])
def test_the_kind_of_device_tells_the_library(cluster, library):
    levels = ClusterSpec.parse(cluster).levels
    assert [level.library.name for level in levels] == [library] * 2


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", GROUPS)
def test_arrays_and_numbers_agree(op, group):
    together = collective_s(op, SIZES, GROUPS[group])
    one_by_one = [collective_s(op, size, GROUPS[group]) for size in SIZES]

    np.testing.assert_allclose(together, one_by_one, rtol=1e-12)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", GROUPS)
def test_the_parts_add_to_the_total_and_name_their_formulas(op, group):
    terms = collective_terms(op, 1e8, GROUPS[group])

    assert float(terms.total_s) == collective_s(op, 1e8, GROUPS[group])
    assert float(terms.fill_s) >= -1e-18
    assert len(terms.formulas) >= 2


def test_ring_formulas_agree_with_the_book():
    n, p, alpha, rate = 1e9, 8, LINK.latency_s, LINK.achieved_bytes_per_s

    gather = collective_terms("all_gather", n, (LINK,), "ring")
    reduce = collective_terms("all_reduce", n, (LINK,), "ring")

    assert gather.latency_s == pytest.approx((p - 1) * alpha * catalogued_library("nccl").ring_latency_factor)
    assert float(gather.transfer_s) == pytest.approx(n * (p - 1) / p / rate)
    assert reduce.latency_s == pytest.approx(2 * gather.latency_s)
    assert float(reduce.transfer_s) == pytest.approx(2 * n * (p - 1) / p / rate)


def test_an_all_to_all_across_nodes_is_priced_by_what_leaves_a_node():
    node, rack = Hop(8, 450e9, 0.0, "node"), Hop(2, 400e9, 0.0, "rack")
    local_bytes = 1e9

    # each of 8 ranks sends half its buffer through the node's one adapter
    assert collective_s("all_to_all", local_bytes, (node, rack)) == pytest.approx(8 * local_bytes / 2 / 400e9)


def test_point_to_point_is_one_message_on_the_outermost_level():
    hops = (Hop(2, 450e9, 1e-6, "node"), Hop(2, 50e9, 5e-6, "rack"))
    assert collective_s("point_to_point", 1e9, hops) == pytest.approx(5e-6 + 1e9 / 50e9)


def test_in_switch_reduction_is_chosen_for_large_messages_on_eight_devices():
    assert collective_terms("all_reduce", 1e9, (SWITCH,)).algorithm == "in_switch"
    assert collective_terms("all_gather", 1e9, (SWITCH,)).algorithm != "in_switch"


def test_wrong_names_are_refused_with_the_known_ones():
    with pytest.raises(CostModelError, match=r"unknown collective 'allreduce' \(did you mean 'all_reduce'\?\); known"):
        collective_s("allreduce", 1.0, (LINK,))
    with pytest.raises(CostModelError, match=r"no algorithm 'in_switch' here \(no level of this group reduces"):
        collective_s("all_reduce", 1.0, (LINK,), "in_switch")


def test_formulas_print_and_refuse_wrong_symbols():
    assert str(FORMULAS["gather_transfer"]) == "gather_transfer = n*(r - 1)/r/B"
    assert "bandwidth of the group" in FORMULAS["gather_transfer"].legend()
    assert str(FORMULAS["gather_transfer"].expression) == "n*(r - 1)/(B*r)"
    with pytest.raises(CostModelError, match=r"no value for r, B; no symbol 'N' \(did you mean 'n'\?\)"):
        FORMULAS["gather_transfer"].evaluate(n=1.0, N=1.0)
