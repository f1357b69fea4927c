"""Unlike devices as one that is as slow as the slowest, and clusters of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import catalog
from cost_models.cluster import ClusterSpec
from cost_models.compute import attention_s, matmul_s, memory_bound_s
from cost_models.device import DeviceSpec, catalogued_device
from cost_models.node import NetworkLevel
from cost_models.weakest import weakest_device

DEVICES = [catalogued_device(name) for name in catalog.names("devices")]
SIZE = st.integers(1, 20000)
_ROUNDING = 1.0 - 1e-12


def cluster(groups: list[str], **more: Any) -> ClusterSpec:
    """Return nodes of two devices each, of kinds `h100` and `a100`."""
    links = {"latency": "1us", "topology": "switch"}
    return ClusterSpec.from_dict({
        "version": 1,
        "name": "mixed",
        "devices": {"h100": {"preset": "h100-sxm-80gb"}, "a100": {"preset": "a100-sxm-40gb"}},
        "nodes": {
            "new": {"device": "h100", "count": 2, "links": {**links, "bandwidth": "450GB/s"},
                    "nic": {"bandwidth": "3200Gbit/s", "latency": "5us"}},
            "old": {"device": "a100", "count": 2, "links": {**links, "bandwidth": "300GB/s"},
                    "nic": {"bandwidth": "800Gbit/s", "latency": "6us"}},
        } | more,
        "groups": [{"node": name, "count": 1} for name in groups],
    })  # fmt: skip


def without_tiles(device: DeviceSpec) -> DeviceSpec:
    return replace(device, multiprocessors=0)


@settings(max_examples=60, deadline=None)
@given(
    devices=st.lists(st.sampled_from(DEVICES), min_size=2, max_size=3),
    sizes=st.tuples(SIZE, SIZE, SIZE),
    evaluations=st.integers(0, 10**9),
)
def test_nothing_is_faster_or_larger_on_the_weakest_than_on_any(
    devices: list[DeviceSpec], sizes: tuple[int, int, int], evaluations: int
):
    m, n, k = sizes
    weakest = weakest_device(devices)

    for each in devices:
        assert weakest.memory_bytes <= each.memory_bytes
        assert weakest.reserved_bytes >= each.reserved_bytes
        for dtype in weakest.peak_flops:
            one, other = (float(matmul_s(1, m, n, k, dtype, without_tiles(d))) for d in (weakest, each))
            assert one >= other * _ROUNDING
            one, other = (float(attention_s(m * n, k, dtype, d)) for d in (weakest, each))
            assert one >= other * _ROUNDING
        one, other = (float(memory_bound_s(m * n, d, evaluations)) for d in (weakest, each))
        assert one >= other * _ROUNDING


def test_large_products_on_the_weakest_take_as_long_as_on_the_slowest():
    fast, slow = catalogued_device("h100-sxm-80gb"), catalogued_device("a100-sxm-80gb")

    both, alone = (float(matmul_s(1, 8192, 8192, 8192, "bfloat16", d)) for d in (weakest_device([fast, slow]), slow))

    assert both == pytest.approx(alone, rel=0.02)


def test_equal_devices_under_two_names_are_one():
    device = DEVICES[0]

    assert weakest_device([device, replace(device, name="other")]) is device


def test_a_cluster_of_equal_nodes_stays_as_it_is():
    equal = ClusterSpec.parse("dgx-h100x2")

    assert equal.as_equal() is equal
    assert equal.as_equal(range(8, 16)) is equal


def test_blocks_of_ranks_see_their_own_devices_and_links_on_the_levels_of_all():
    mixed = cluster(["new", "new", "old", "old"])

    new, old, both = (mixed.as_equal(ranks) for ranks in (range(4), range(4, 8), range(2, 6)))

    assert (new.device.name, old.device.name, both.device.name) == ("h100", "a100", "weakest of h100 and a100")
    assert [each.levels[0].bytes_per_s for each in (new, old, both)] == [450e9, 300e9, 300e9]
    assert [each.levels[1].bytes_per_s for each in (new, old, both)] == [400e9, 100e9, 100e9]
    assert both.levels == mixed.levels == new.slower_of(old).levels
    assert [level.fanout for level in new.levels] == [2, 4]
    assert both.memory_bytes == old.memory_bytes < new.memory_bytes
    assert mixed.as_equal().is_homogeneous


def test_nodes_of_unlike_sizes_are_cut_into_parts_that_share_the_adapter():
    links = {"latency": "1us", "topology": "switch", "bandwidth": "300GB/s"}
    nic = {"bandwidth": "800Gbit/s", "latency": "6us"}
    mixed = cluster(["old", "new"], old={"device": "a100", "count": 6, "links": links, "nic": nic})

    cut = mixed.in_equal_nodes()

    assert [(group.node.name, group.node.count, group.count) for group in cut.groups] == [("old", 2, 3), ("new", 2, 1)]
    assert cut.devices == mixed.devices
    assert cut.groups[0].node.nic.bytes_per_s == pytest.approx(100e9 / 3)
    assert cut.groups[1].node.nic == mixed.groups[1].node.nic
    old, new = mixed.as_equal(range(6)), mixed.as_equal(range(6, 8))
    assert (old.device.name, new.device.name) == ("a100", "h100")
    assert [level.fanout for level in old.levels] == [level.fanout for level in new.levels] == [2, 4]
    assert old.levels[1].bytes_per_s == pytest.approx(100e9 / 3)
    assert mixed.as_equal().levels[1].bytes_per_s == old.levels[1].bytes_per_s


def test_cut_nodes_meet_on_a_level_as_slow_as_the_slowest():
    nodes = {"new": {"device": "h100", "count": 1, "nic": {"bandwidth": "800Gbit/s", "latency": "5us"}}}
    mixed = cluster(["old", "new", "old", "new"], **nodes)
    levels = (NetworkLevel("rack", size=2), NetworkLevel("spine", oversubscription=4.0, latency_s=9e-6))

    cut = replace(mixed, network=levels).in_equal_nodes()

    (level,) = cut.as_equal().levels[1:]
    assert (level.name, level.fanout, level.latency_s) == ("spine", 6, 9e-6)
    assert level.bytes_per_s == pytest.approx(100e9 / 2 / 4)
