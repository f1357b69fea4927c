"""Devices that share the cores of their machine are slower while all compute, by what the cores lack."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cost_models import detect
from cost_models.calibration import Calibration, Machine, read_calibration
from cost_models.cluster import ClusterSpec
from cost_models.collectives import collective_s, host_s
from cost_models.compute import fresh_s, matmul_s, memory_bound_s
from cost_models.device import catalogued_device
from cost_models.errors import ClusterError
from cost_models.node import NodeGroup
from cost_models.topology import axis_hops

MIB = 2**20


def document(count: int = 4, nodes: int = 1, **node: Any) -> dict[str, Any]:
    links = {"links": {"preset": "loopback-gloo"}} if count > 1 else {}
    nic = {"bandwidth": "200Mbit/s", "latency": "100us", "host_bandwidth": "300MB/s"}
    return {
        "version": 1,
        "nodes": {"host": {"device": "cpu", "count": count, "nic": nic, **links, **node}},
        "groups": [{"node": "host", "count": nodes}],
    }


def cluster(count: int = 4, nodes: int = 1, **node: Any) -> ClusterSpec:
    return ClusterSpec.from_dict(document(count, nodes, **node))


SHARES = [
    (cluster(), 1.0),
    (cluster(cores=8), 1.0),
    (cluster(cores=2), 0.5),
    (cluster(cores=1.25), 0.3125),
    (cluster(2, 2, cores=2), 1.0),
    (cluster(1, 4, cores=2, nodes_per_machine=4), 0.5),
    (cluster(1, 2, cores=1, nodes_per_machine=4), 0.5),  # the machine of four has two of them in this cluster
    (cluster(2, 4, cores=2, nodes_per_machine=2), 0.5),
]


@pytest.mark.parametrize(("spec", "share"), SHARES)
def test_a_device_has_its_part_of_the_machines_cores_and_one_at_most(spec: ClusterSpec, share: float):
    assert spec.share == share
    assert spec.alone.share == 1.0
    assert (spec.shared_cores is None) == (share == 1.0)


def test_all_that_a_device_does_takes_longer_by_the_same_factor():
    spec = cluster(cores=1)
    shared, alone = spec.device, spec.alone.device

    for seconds in (
        lambda device: matmul_s(1, 100, 200, 300, "float32", device),
        lambda device: memory_bound_s(MIB, device, 5 * MIB),
        lambda device: memory_bound_s(MIB, device),
        lambda device: fresh_s(64 * MIB, device),
    ):
        assert seconds(shared) == pytest.approx(4 * seconds(alone), rel=1e-12)
    assert shared.memory_bytes == alone.memory_bytes


def test_loopback_is_moved_by_cores_and_a_network_is_not():
    spec = cluster(2, 2, cores=1)
    inside, across = ([axis_hops(each.levels, (2, 2), axis) for each in (spec, spec.alone)] for axis in (1, 0))

    assert collective_s("all_reduce", 1e6, inside[0]) == pytest.approx(2 * collective_s("all_reduce", 1e6, inside[1]))
    assert collective_s("all_reduce", 1e6, across[0]) == collective_s("all_reduce", 1e6, across[1])
    assert host_s("all_reduce", 1e6, across[0]) == pytest.approx(2 * host_s("all_reduce", 1e6, across[1]))


@pytest.mark.parametrize(("spec", "_"), SHARES)
def test_the_resolved_cluster_says_which_cores_are_shared(spec: ClusterSpec, _: float):
    assert ClusterSpec.from_dict(spec.to_dict()) == spec


def test_a_cluster_that_shares_nothing_has_the_file_and_fingerprint_it_had():
    assert "cores" not in ClusterSpec.parse("cpu:4").to_dict()["nodes"]["node"]
    assert cluster(cores=2).fingerprint() != cluster().fingerprint()
    assert not ClusterSpec("two", (*cluster().groups, *cluster(cores=2).groups)).is_homogeneous


REFUSED = [
    (document(cores=0), "nodes.host.cores: must be more than 0, but is 0"),
    (document(cores="two"), "nodes.host.cores: must be a number, but is 'two'"),
    (document(nodes_per_machine=2), "which nodes share cores, but not how many; add such as `cores: 2`"),
    (document(cores=2, nodes_per_machine=0), "nodes_per_machine: must be at least 1, but is 0"),
    (document(cores=2, device="h100-sxm-80gb"), "are shared by ranks that compute on the CPU, and 'h100-sxm-80gb' is"),
]


@pytest.mark.parametrize(("made", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_cores_that_cannot_be_are_refused(made: dict[str, Any], message: str):
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_dict(made)

    assert message in str(caught.value)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_nvidia_smi", list)
    monkeypatch.setattr(detect, "_cores", lambda: 2.0)
    monkeypatch.setattr(detect, "_memory_bytes", lambda: 8 * 2**30)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(("ranks", "count", "cores"), [(None, 2, 0.0), (2, 2, 0.0), (1, 1, 0.0), (4, 4, 2.0)])
def test_more_ranks_than_this_machine_has_cores_share_them(ranks: int | None, count: int, cores: float):
    spec = ClusterSpec.detect(ranks)

    assert (spec.device_count, spec.groups[0].node.cores) == (count, cores)
    assert spec.memory_bytes == 8 * 2**30 // count


@pytest.mark.usefixtures("two_cores")
def test_cpu_ranks_are_described_whatever_gpus_there_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(detect, "_nvidia_smi", lambda: ["NVIDIA L4, 23034"] * 2)

    assert ClusterSpec.detect().device.name == "l4"
    assert ClusterSpec.detect(cpu_ranks=4).shared_cores == (2.0, 4)


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 3.0), ("150000 100000", 1.5), ("900000 100000", 3.0)])
def test_a_control_groups_limit_is_a_number_of_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, cores: float
):
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(detect, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(detect.os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)

    assert detect._cores() == cores


def calibrated(folder: Path, measured: Machine, **node: Any) -> ClusterSpec:
    """The cluster file of `document(**node)` with a calibration whose device does half of the catalogue's FLOPs."""
    device = replace(
        catalogued_device("cpu"), peak_flops={"float32": catalogued_device("cpu").peak_flops["float32"] / 2}
    )
    (folder / "cluster.yaml").write_text(yaml.safe_dump({**document(**node), "calibration": "it.json"}))
    (folder / "it.json").write_text(Calibration(measured, device).to_json())
    return ClusterSpec.from_file(folder / "cluster.yaml")


MACHINE = Machine("Test CPU", "cpu", "cpu", "gloo", nodes=4, devices_per_node=1, date="2026-11-22T12:00:00+00:00")


def test_measured_cores_take_the_place_of_described_ones(tmp_path: Path):
    spec = calibrated(tmp_path, replace(MACHINE, cores=1.5, nodes_per_machine=4), count=1, nodes=4, cores=9)

    assert spec.shared_cores == (1.5, 4)
    assert spec.alone.device.flops_for("float32") == catalogued_device("cpu").flops_for("float32") / 2
    assert spec.device.flops_for("float32") == spec.alone.device.flops_for("float32") * 1.5 / 4


def test_figures_measured_while_all_computed_are_not_made_slower_once_more(tmp_path: Path):
    spec = calibrated(tmp_path, MACHINE, count=1, nodes=4, cores=2, nodes_per_machine=4)

    assert spec.share == 1.0


def test_what_two_devices_did_at_once_does_not_limit_four(tmp_path: Path):
    two = replace(MACHINE, nodes=1, devices_per_node=2, cores=2.0)

    assert calibrated(tmp_path, two, count=4).share == 1.0
    assert calibrated(tmp_path, two, count=4, cores=3).share == 0.75


def test_a_calibration_file_holds_the_cores_where_they_were_measured(tmp_path: Path):
    for machine in (MACHINE, replace(MACHINE, cores=1.9, nodes_per_machine=4)):
        path = tmp_path / "calibration.json"
        path.write_text(Calibration(machine, catalogued_device("cpu")).to_json())

        assert read_calibration(path).machine == machine
        assert ("cores" in json.loads(path.read_text())["machine"]) == (machine.cores > 0)


def test_a_group_of_fewer_nodes_than_a_machine_has_shares_among_itself():
    node = cluster(1, 4, cores=2, nodes_per_machine=4).groups[0].node

    assert [NodeGroup(node, count).share for count in (1, 2, 3, 4, 8)] == [1.0, 1.0, 2 / 3, 0.5, 0.5]
