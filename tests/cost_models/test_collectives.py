import csv
import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest

from cost_models.cluster import ClusterSpec
from cost_models.collectives import FORMULAS, OPS, collective_s, collective_terms
from cost_models.errors import CostModelError
from cost_models.topology import Hop, axis_hops

LINK = Hop(8, 300e9, 3e-6, "node", efficiency=0.8, call_s=20e-6)
SWITCH = dataclasses.replace(LINK, in_switch_reduction=True)
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
    assert (collective_s(op, SIZES, hops, "hierarchical") <= collective_s(op, SIZES, hops, "ring") * (1 + 1e-12)).all()


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

    assert gather.latency_s == pytest.approx((p - 1) * alpha)
    assert float(gather.transfer_s) == pytest.approx(n * (p - 1) / p / rate)
    assert reduce.latency_s == pytest.approx(2 * (p - 1) * alpha)
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


PRESET_OF = {
    "p4de": "p4de",
    "p5.48": "p5",
    "p5en": "p5en",
    "p6-b200": "p6-b200",
    "H200": "dgx-h200",
    "A100": "dgx-a100-80gb",
}
# Mean absolute relative error that is allowed, by nodes of the row; seen: 0.05, 0.07 and 0.14. The links of the
# catalogue are fitted to these same rows, so this guards against slips and says nothing of other fabrics. Left out:
# rows of 4 nodes below 1 MiB (3.2 ms for 64 KiB but 0.36 ms for 512 KiB) and hardware that the source does not name.
BAND = {1: 0.08, 2: 0.10, 4: 0.20}


def measured_rows():
    with (Path(__file__).parent / "data" / "collectives.csv").open() as file:
        for row in csv.DictReader(file):
            preset = next((p for text, p in PRESET_OF.items() if text in row["hardware"]), None)
            nodes, ranks, size = int(row["nodes"]), int(row["gpus"]), float(row["bytes"] or 0)
            if preset is None or not size or (nodes == 4 and size < 2**20):
                continue
            op = row["op"].split()[0]
            algorithm = "ring" if "ring" in row["op"] else "auto"
            seconds = re.search(r"time ([\d.]+) us", row["notes"])
            share = (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)
            measured_s = float(seconds[1]) * 1e-6 if seconds else size * share / (float(row["busbw"]) * 1e9)
            yield preset, nodes, ranks, op, algorithm, size, measured_s


@pytest.mark.parametrize("nodes", BAND)
def test_published_collectives_are_reproduced_within_the_band(nodes):
    errors = []
    for preset, count, ranks, op, algorithm, size, measured_s in measured_rows():
        if count != nodes:
            continue
        levels = ClusterSpec.parse(f"{preset}x{nodes}").levels
        inner = dataclasses.replace(levels[0], fanout=ranks // nodes)
        predicted_s = collective_s(op, size, axis_hops((inner, *levels[1:]), (ranks,), 0), algorithm)
        errors.append(abs(predicted_s / measured_s - 1))

    assert len(errors) >= 6
    assert math.fsum(errors) / len(errors) < BAND[nodes], sorted(errors)
