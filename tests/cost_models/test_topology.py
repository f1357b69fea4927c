import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.cluster import ClusterSpec
from cost_models.errors import ClusterError
from cost_models.node import Level
from cost_models.topology import axis_hops

NODE = Level("node", 8, 450e9, 1e-6, "switch", True)
RACK = Level("rack", 8, 400e9, 5e-6, "fat-tree", False)
LEVELS = (NODE, RACK)

# mesh, axis, (ranks, level, bandwidth in GB/s) of every hop
HOPS = [
    ((8, 8), 1, [(8, "node", 450.0)]),
    ((8, 8), 0, [(8, "rack", 50.0)]),
    ((8, 8), -2, [(8, "rack", 50.0)]),
    ((4, 16), 1, [(8, "node", 450.0), (2, "rack", 400.0)]),
    ((4, 16), 0, [(4, "rack", 50.0)]),
    ((64,), 0, [(8, "node", 450.0), (8, "rack", 400.0)]),
    ((16, 4), 0, [(2, "node", 450.0), (8, "rack", 100.0)]),
    ((2, 8, 4), 1, [(2, "node", 450.0), (4, "rack", 100.0)]),
    ((8, 1, 8), 1, []),
    ((2, 2), 0, [(2, "node", 450.0)]),
    ((3, 8), 0, [(3, "rack", 50.0)]),
    ((2, 3), 1, [(3, "node", 450.0)]),
]


@pytest.mark.parametrize(("mesh", "axis", "expected"), HOPS, ids=[f"{m}[{a}]" for m, a, _ in HOPS])
def test_an_axis_shares_its_levels_with_the_other_groups_of_a_node(mesh, axis, expected):
    hops = axis_hops(LEVELS, mesh, axis)

    assert [(hop.ranks, hop.level, hop.bytes_per_s / 1e9) for hop in hops] == expected


@given(st.data())
def test_ranks_of_the_hops_multiply_to_the_axis(data):
    left = 64
    sizes = []
    while left > 1:
        size = data.draw(st.sampled_from([each for each in (1, 2, 4, 8, 16, 32, 64) if left % each == 0]))
        sizes.append(size)
        left //= size
        if len(sizes) == 4:
            sizes.append(left)
            break
    mesh = tuple(sizes)

    for axis, size in enumerate(mesh):
        hops = axis_hops(LEVELS, mesh, axis)

        assert math.prod(hop.ranks for hop in hops) == size
        assert all(hop.ranks > 1 for hop in hops)


def test_oversubscription_takes_bandwidth_from_the_outer_level():
    document = ClusterSpec.parse("h100-sxm-80gb:8x4").to_dict()
    document["network"] = [{"level": "rack", "size": 2}, {"level": "pod", "oversubscription": 2}]
    levels = ClusterSpec.from_dict(document).levels

    hops = axis_hops(levels, (4, 8), 0)

    assert [(hop.ranks, hop.level, hop.bytes_per_s) for hop in hops] == [(2, "rack", 50e9), (2, "pod", 50e9)]
    # a pod's endpoint is a rack: 2 adapters of 400 GB/s, halved, shared by the 8 groups that pass


def test_idle_devices_need_not_divide():
    assert axis_hops(LEVELS, (6,), 0)[0].ranks == 6


def test_a_group_on_a_full_mesh_has_only_the_links_to_its_members():
    full_mesh = Level("node", 8, 448e9, 1e-6, "mesh", False)

    assert axis_hops((full_mesh,), (4, 2), 1)[0].bytes_per_s == 64e9
    assert axis_hops((full_mesh,), (8,), 0)[0].bytes_per_s == 448e9


def test_a_group_on_a_cube_mesh_has_the_links_among_its_members():
    dgx1 = Level("node", 8, 150e9, 1e-6, "cube-mesh", False)
    share = {
        (mesh, axis): axis_hops((dgx1,), mesh, axis)[0].bytes_per_s / 25e9
        for mesh, axis in (((4, 2), 1), ((2, 4), 1), ((8,), 0), ((2, 4), 0), ((4, 2), 0))
    }

    assert list(share.values()) == [1.0, 4.0, 6.0, 2.0, 2.0]


def test_only_a_switch_level_reduces():
    inner, outer = axis_hops(LEVELS, (64,), 0)
    assert (inner.in_switch_reduction, outer.in_switch_reduction) == (True, False)


REFUSED = [
    (
        (12,),
        "an axis of 12 ranks, 1 apart, spans 12 ranks, which does not divide evenly into level 'node' of 8 devices",
    ),
    ((8, 3), "an axis of 3 ranks, 1 apart, spans 3 ranks, which does not divide evenly into level 'node' of 8 devices"),
    ((128,), "mesh (128,) needs 128 devices and the cluster has 64"),
    ((2, 0), "mesh (2, 0) has an axis of fewer than 1 rank"),
]


@pytest.mark.parametrize(("mesh", "message"), REFUSED, ids=[str(m) for m, _ in REFUSED])
def test_a_mesh_that_does_not_fit_is_refused_with_numbers(mesh, message):
    with pytest.raises(ClusterError) as caught:
        axis_hops(LEVELS, mesh, len(mesh) - 1)

    assert message in str(caught.value)
