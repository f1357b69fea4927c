"""Which meshes are tried: degrees that the user fixes, and those that split experts."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.search.meshes import MeshAxis, by_tokens, candidates, divisors, freer
from autopar.search.trials import in_time


def roles(devices: int, fixed: Mapping[str, int], experts: int = 0, forbidden: tuple[str, ...] = ()) -> set[str]:
    found = candidates(devices, 8, fixed, forbidden, experts)
    return {" x ".join(f"{axis.role}={axis.size}" for axis in mesh) for mesh in found}


def test_experts_are_split_in_each_way_that_divides_them_and_the_devices():
    more = roles(64, {}, experts=8) - roles(64, {})

    assert more == {"dp_shard=32 x ep=2", "dp_shard=16 x ep=4", "dp_shard=8 x ep=8"}


@pytest.mark.parametrize(("fixed", "forbidden"), [({}, ("ep",)), ({"dp_shard": 8}, ()), ({"ep": 1}, ())], ids=str)
def test_experts_stay_whole_where_that_is_wished(fixed: dict[str, int], forbidden: tuple[str, ...]):
    assert roles(64, fixed, 8, forbidden) == roles(64, fixed, 0, forbidden)


@pytest.mark.parametrize("devices", [24, 72])
def test_tensors_are_split_over_no_ranks_that_have_parts_of_few(devices: int):
    tried = candidates(devices, 8, {}, (), splits_tensors=lambda size: size in {2, 4, 8})
    known = candidates(devices, 8, {"tp": 3}, (), splits_tensors=lambda size: size in {2, 4, 8})

    assert {axis.size for mesh in tried for axis in mesh if axis.role == "free"} == {2, 4, 8}
    assert all(axis.size == 3 for mesh in known for axis in mesh if axis.role == "tp")
    assert known


def test_an_axis_over_more_devices_than_the_limit_is_data_parallel():
    assert (MeshAxis("dp_shard", 64),) in candidates(64, 8, {}, ())
    assert (MeshAxis("free", 64),) in candidates(64, 8, {}, (), free_limit=64)
    assert (MeshAxis("free", 64),) not in candidates(64, 8, {}, (), free_limit=32)


@pytest.mark.parametrize(
    ("batch", "depth", "tried"),
    [
        (1, 1, ["cp=8 x tp=4"]),
        (4, 1, ["dp_shard=4 x cp=2 x tp=4"]),
        (6, 1, ["dp_shard=2 x cp=4 x tp=4"]),
        (8, 1, []),
        (16, 2, []),
        (8, 2, ["dp_shard=4 x cp=2 x tp=4", "cp=8 x tp=4"]),
        (1, 4, ["cp=8 x tp=4"]),
    ],
)
def test_tokens_are_split_over_ranks_that_have_no_samples(batch: int, depth: int, tried: list[str]):
    mesh = (MeshAxis("dp_shard", 8), MeshAxis("free", 4))

    found = by_tokens(mesh, batch, depth, lambda size: size in {2, 4, 8})

    assert [" x ".join(f"{axis.role}={axis.size}" for axis in each) for each in found] == tried
    assert not by_tokens(mesh, batch, depth, lambda _: False)


def test_fixed_degrees_lie_data_outside_then_tokens_experts_and_tensors():
    assert roles(16, {"tp": 2, "ep": 2, "cp": 2, "dp_shard": 2}) == {"dp_shard=2 x cp=2 x ep=2 x tp=2"}


def test_nothing_is_left_over_that_no_role_may_take():
    assert not roles(16, {"ep": 2}, forbidden=("tp", "dp_shard", "dp_replicate"))
    assert not roles(12, {"cp": 8})


@given(devices=st.integers(1, 64), ep=st.integers(1, 8), cp=st.integers(1, 4), experts=st.integers(0, 16))
def test_every_mesh_has_all_devices_and_the_degrees_asked_for(devices: int, ep: int, cp: int, experts: int):
    for fixed in ({"ep": ep, "cp": cp}, {"cp": cp}):
        for mesh in candidates(devices, 8, fixed, (), experts):
            sizes = {axis.role: axis.size for axis in mesh}
            assert prod(sizes.values()) == devices
            assert sizes.get("cp", 1) == cp
            if "ep" in fixed:
                assert sizes.get("ep", 1) == ep
            elif "ep" in sizes:
                assert experts % sizes["ep"] == 0


@pytest.mark.parametrize("fixed", [{"ep": 8}, {"cp": 4}], ids=str)
def test_data_parallelism_lies_outside_what_tokens_and_experts_are_split_over(fixed: dict[str, int]):
    role, size = next(iter(fixed.items()))
    rest = 64 // size

    assert f"dp_shard={rest} x {role}={size}" in roles(64, fixed)
    for mesh in in_time(candidates(64, 8, fixed, ()), 64, 1):
        kinds = [axis.role for axis in mesh]
        assert "dp_shard" not in kinds or kinds.index("dp_shard") < kinds.index(role)


def test_free_axes_bound_what_data_and_tensor_parallel_ones_can_do():
    """Meshes that are settled need no relaxation of their own to be proven slower."""
    mesh = (MeshAxis("dp_replicate", 2), MeshAxis("tp", 2))

    assert list(freer(mesh)) == [
        mesh, (mesh[0], MeshAxis("free", 2)), (MeshAxis("free", 2), mesh[1]), (MeshAxis("free", 2),) * 2
    ]  # fmt: skip
    assert list(freer((MeshAxis("cp", 2),))) == [(MeshAxis("cp", 2),)]
    experts = (MeshAxis("dp_shard", 2), MeshAxis("ep", 2))
    assert list(freer(experts)) == [experts]


@pytest.mark.parametrize("devices", [2, 4, 16, 64])
@pytest.mark.parametrize("fixed", [{}, {"tp": 2}, {"dp_replicate": 2}, {"cp": 2}], ids=str)
def test_each_mesh_has_ranks_to_shard_over_where_that_is_wished(devices: int, fixed: dict[str, int]):
    found = candidates(devices, 8, fixed, (), sharded=True)

    assert bool(found) == (devices > 2 or not {"tp", "dp_replicate"} & set(fixed))
    assert all({axis.role for axis in mesh} & {"dp_shard", "cp", "ep"} for mesh in found)


@given(st.integers(1, 5000))
def test_divisors_are_all_that_divide_a_number_smallest_first(number: int):
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


def test_a_batch_of_any_size_has_its_divisors_in_no_time():
    assert len(divisors(10**14)) == 15**2
