"""Timings become the constants they were made with; files of other machines and formats are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cost_models import catalog
from cost_models.calibration import Calibration, Machine, level_figures, read_calibration
from cost_models.calibration_fit import fit_device, fit_level
from cost_models.cluster import ClusterSpec
from cost_models.collectives import OPS, collective_s, host_s
from cost_models.compute import attention_s, convolution_product, fresh_s, matmul_s, memory_bound_s
from cost_models.device import DeviceSpec, catalogued_device
from cost_models.errors import ClusterError, CostModelError
from cost_models.nccl_tests import parse_nccl_tests, read_nccl_tests
from cost_models.topology import axis_hops

MIB = 2**20
OUTPUT = Path(__file__).parent / "nccl_all_reduce_perf.txt"
CLUSTER = {
    "version": 1,
    "name": "two-hosts",
    "devices": {"core": {"preset": "cpu"}},
    "nodes": {"host": {"device": "core", "count": 1, "nic": {"bandwidth": "1Gbit/s", "latency": "100us"}}},
    "groups": [{"node": "host", "count": 2}],
    "calibration": "calibration.json",
}


def true_device() -> DeviceSpec:
    return replace(
        catalogued_device("cpu"),
        memory_bytes_per_s=20e9,
        memory_efficiency=1.0,
        memory_half_bytes=30e3,
        peak_flops={"float32": 60e9},
        matmul_efficiency={"float32": 0.9},
        matmul_half=(20, 9, 15),
        convolution_efficiency={"float32": 1.0},
        convolution_half=(3, 6, 30),
        attention_efficiency=0.5,
        attention_half=70.0,
        kernel_launch_s=8e-6,
        transcendentals_per_s=3e8,
        fresh_bytes=24 * MIB,
        fresh_bytes_per_s=1e9,
    )


def kernels_of(device: DeviceSpec) -> list[dict[str, Any]]:
    """What `runtime.measure_kernels` would report of the device, without noise."""

    def sample(kernel: str, seconds: Any, **sizes: Any) -> dict[str, Any]:
        return {"kernel": kernel, **sizes, "seconds": [float(seconds)] * 3}

    found = [sample("launch", device.kernel_launch_s)]
    found += [
        sample("elementwise", memory_bound_s(size, device), bytes=size) for size in (3 * 2**i for i in range(16, 27, 2))
    ]
    found.append(sample("exp", memory_bound_s(8 * MIB, device, MIB), elements=MIB))
    for size in (8 * MIB, 16 * MIB, 24 * MIB, 64 * MIB):
        old = float(memory_bound_s(2 * size, device))
        found.append(sample("fresh", old + fresh_s(size, device), bytes=size, old_s=[old]))
    for sizes in ((1, 16, 512, 512), (1, 512, 16, 512), (1, 512, 512, 16), (8, 64, 64, 64), (1, 1024, 1024, 1024)):
        found.append(sample("matmul", matmul_s(*sizes, "float32", device), dtype="float32", sizes=list(sizes)))
    for weight in ((32, 32, 3, 3), (256, 64, 1, 1), (8, 256, 3, 3), (512, 512, 3, 3), (96, 1, 7, 7)):
        for of in ("result", "input", "weight"):
            for pixels in (16, 4096):
                seconds = matmul_s(*convolution_product(pixels, weight, of), "float32", device.for_convolutions())
                found.append(sample("convolution", seconds, dtype="float32", of=of, pixels=pixels, weight=list(weight)))
    for keys in (16, 128, 2048):
        seconds = attention_s(1e9, MIB, "float32", device, keys)
        found.append(sample("attention", seconds, flops=1e9, bytes=MIB, dtype="float32", positions=keys))
    return found


def test_kernels_timed_on_a_device_give_back_its_constants():
    truth = true_device()

    found, figures = fit_device(catalogued_device("cpu"), kernels_of(truth))

    assert found.flops_for("float32") * found.matmul_efficiency_for("float32") == pytest.approx(54e9, rel=0.03)
    assert found.matmul_half == pytest.approx(truth.matmul_half, abs=2)
    assert found.flops_for("float32") * found.convolution_efficiency["float32"] == pytest.approx(60e9, rel=0.02)
    assert found.convolution_half == pytest.approx(truth.convolution_half, abs=2)
    assert found.memory_bytes_per_s * found.memory_efficiency == pytest.approx(20e9, rel=0.01)
    assert found.memory_half_bytes == pytest.approx(30e3, rel=0.05)
    assert (found.kernel_launch_s, found.fresh_bytes) == (8e-6, 24 * MIB)
    assert found.fresh_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert found.transcendentals_per_s == pytest.approx(3e8, rel=0.01)
    assert found.attention_efficiency == pytest.approx(0.5 * 60e9 / found.flops_for("float32"), rel=0.02)
    assert found.attention_half == pytest.approx(70, rel=0.05)
    assert max(each.error for each in figures) < 0.02


def test_kernels_timed_on_a_gpu_give_back_its_constants():
    base = catalogued_device("h100-sxm-80gb")
    truth = replace(
        base,
        kernel_launch_s=3e-6,
        memory_efficiency=0.8,
        memory_half_bytes=4e6,
        matmul_efficiency={"bfloat16": 0.7, "float32": 0.6},
        matmul_half=(0, 0, 300),
        matmul_best={},
        attention_efficiency=0.4,
        vendor_attention_efficiency=0.0,
    )

    def sample(kernel: str, seconds: Any, **sizes: Any) -> dict[str, Any]:
        return {"kernel": kernel, **sizes, "seconds": [float(seconds)] * 3}

    samples = [sample("launch", 3e-6)]
    for size in (3 * 2**i for i in range(16, 31, 2)):
        samples.append(sample("elementwise", memory_bound_s(size, truth), bytes=size))
    for dtype in ("float32", "bfloat16"):
        for sizes in ((1, 512, 512, 512), (1, 2048, 2048, 2048), (1, 4096, 4096, 512), (1, 8192, 8192, 8192)):
            samples.append(sample("matmul", matmul_s(*sizes, dtype, truth), dtype=dtype, sizes=list(sizes)))
    for keys in (256, 4096):
        seconds = attention_s(1e12, MIB, "bfloat16", truth, keys)
        samples.append(sample("attention", seconds, flops=1e12, bytes=MIB, dtype="bfloat16", positions=keys))

    found, figures = fit_device(base, samples)

    assert found.kernel_launch_s == 3e-6
    assert found.memory_bytes_per_s * found.memory_efficiency == pytest.approx(0.8 * 3.35e12, rel=0.02)
    assert found.memory_half_bytes == pytest.approx(4e6, rel=0.05)
    assert found.matmul_efficiency["bfloat16"] == pytest.approx(0.7, rel=0.02)
    assert found.matmul_efficiency["float32"] == pytest.approx(0.6, rel=0.02)
    assert found.attention_efficiency == pytest.approx(0.4, rel=0.02)
    assert max(each.error for each in figures) < 0.02


H200 = Path(__file__).parents[2] / "benchmarks" / "results" / "calibration_h200.json"


def test_a_calibration_of_a_gpu_is_read_and_its_attention_stands_for_the_vendors_too(tmp_path: Path):
    made = json.loads(H200.read_text())
    rest = [each for each in made["samples"] if each["kernel"] != "attention"]
    cluster = {"version": 1, "name": "one", "nodes": {"node": {"device": "h200", "count": 1}}}
    cluster |= {"groups": [{"node": "node", "count": 1}], "calibration": "calibration.json"}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    vendors = catalogued_device("h200").vendor_attention_efficiency

    for samples, expected in ((made["samples"], made["device"]["attention_efficiency"]), (rest, vendors)):
        (tmp_path / "calibration.json").write_text(json.dumps({**made, "samples": samples}))
        spec = ClusterSpec.from_file(tmp_path / "cluster.yaml")

        assert spec.device.attention_share == expected
        assert ClusterSpec.from_dict(spec.to_dict()).device == spec.device


def test_the_kernels_timed_on_an_h200_are_fitted_as_its_calibration_says():
    made = json.loads(H200.read_text())

    found, figures = fit_device(catalogued_device("h200"), made["samples"])

    assert found.attention_efficiency == pytest.approx(made["device"]["attention_efficiency"])
    assert found.memory_half_bytes == pytest.approx(14.4e6, rel=0.01)
    errors = {each.figure: each.error for each in figures}
    assert errors["matmul.bfloat16"] < 0.05
    assert max(errors.values()) < 0.2


def test_an_allocator_that_keeps_memory_has_no_fresh_size():
    kept = replace(true_device(), fresh_bytes=0)

    found, _ = fit_device(catalogued_device("cpu"), kernels_of(kept))

    assert (found.fresh_bytes, found.fresh_bytes_per_s) == (0, 0.0)


def test_collectives_timed_on_a_link_give_back_its_constants():
    base = ClusterSpec.from_dict(CLUSTER).levels[1]
    truth = replace(
        base,
        latency_s=250e-6,
        call_s=90e-6,
        efficiency=0.8,
        efficiency_of={"all_to_all": 0.5},
        host_bytes_per_s=4e8,
    )
    hops = axis_hops((truth,), (2,), 0)
    samples: list[dict[str, Any]] = [
        {"op": op, "ranks": 2, "bytes": size, "seconds": [collective_s(op, float(size), hops)]}
        for op in ("all_reduce", "all_gather", "all_to_all")
        for size in (64, 4096, 2**18, 2**22, 2**25)
    ]
    for size in (2**22, 2**24):
        both = 1.0 + truth.call_s + host_s("all_reduce", size, hops)
        samples.append(
            {"op": "all_reduce", "ranks": 2, "bytes": size, "compute_s": 1.0, "seconds": [both], "beside": True}
        )

    found, figures = fit_level((base,), 0, samples)

    assert found.latency_s == pytest.approx(250e-6, rel=0.05)
    assert found.call_s == pytest.approx(90e-6, rel=0.1)
    assert found.efficiency == pytest.approx(0.8, rel=0.02)
    assert found.efficiency_of == {"all_to_all": pytest.approx(0.5, rel=0.02)}
    assert found.host_bytes_per_s == pytest.approx(4e8, rel=0.02)
    assert {each.figure for each in figures} >= {"latency", "call_overhead", "bandwidth.all_to_all", "host_bandwidth"}


def test_the_output_of_nccl_tests_is_read_and_makes_the_link_slower_or_faster():
    run = read_nccl_tests(OUTPUT)
    level = ClusterSpec.parse("h100-sxm-80gb:8").levels[0]

    fitted, _ = fit_level((level,), 0, run.samples)

    assert (run.op, run.ranks, run.hosts, run.device) == ("all_reduce", 8, 1, "NVIDIA H100 80GB HBM3")
    assert [each["bytes"] for each in run.samples] == [1024, 65536, 4194304, 268435456, 8589934592]
    assert run.samples[3]["seconds"] == pytest.approx([1093.2e-6, 1091.7e-6])
    predicted = collective_s("all_reduce", 8589934592.0, axis_hops((fitted,), (8,), 0))
    assert predicted == pytest.approx(31480e-6, rel=0.05)


NO_RUN = [
    ("1024 256 float sum -1 33.12 0.03 0.05 0\n", "lists 0 ranks under '# Using devices'"),
    (OUTPUT.read_text().replace("all_reduce", "warp_drive"), "does not say which collective it timed"),
    (OUTPUT.read_text().replace("algbw", "").replace("time", ""), "has no header '# size count type ... time"),
    ("\n".join(line for line in OUTPUT.read_text().splitlines() if line.startswith("#")), "has no row of figures"),
]


@pytest.mark.parametrize(("text", "message"), NO_RUN, ids=[message for _, message in NO_RUN])
def test_what_is_no_output_of_nccl_tests_is_refused(text: str, message: str):
    with pytest.raises(CostModelError, match=f"^log: .*{message[:25]}".replace("(", "\\(")):
        parse_nccl_tests(text, "log")


def calibration_of(spec: ClusterSpec, **machine: Any) -> Calibration:
    told = {
        "hardware": "Test CPU", "kind": "cpu", "catalog": "cpu", "library": "gloo", "nodes": 2, "devices_per_node": 1,
        "date": "2026-11-21T20:00:00+00:00",
    }  # fmt: skip
    level = replace(spec.levels[1], latency_s=3e-3, efficiency=0.5, efficiency_of={"all_to_all": 0.25})
    return Calibration(Machine(**{**told, **machine}), true_device(), (), (level_figures(level, ()),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    return tmp_path


def write(folder: Path, calibration: Calibration, **changes: Any) -> None:
    document = {**json.loads(calibration.to_json()), **changes}
    (folder / "calibration.json").write_text(json.dumps(document))


def test_a_calibration_that_a_cluster_file_names_changes_its_prices(folder: Path):
    plain = ClusterSpec.from_dict(CLUSTER)
    write(folder, calibration_of(plain))

    cluster = ClusterSpec.from_file(folder / "cluster.yaml")

    hops = axis_hops(cluster.levels, (2,), 0)
    assert collective_s("all_reduce", 8.0, hops) > collective_s("all_reduce", 8.0, axis_hops(plain.levels, (2,), 0))
    assert collective_s("all_to_all", 1e9, hops) == pytest.approx(1e9 / 2 / (125e6 * 0.25), rel=0.01)
    assert matmul_s(1, 999, 999, 999, "float32", cluster.device) == matmul_s(1, 999, 999, 999, "float32", true_device())
    assert cluster.memory_bytes == plain.memory_bytes
    assert cluster.calibrated == "calibration.json: autopar calibrate, 2026-11-21, 2 x 1 Test CPU"


def test_a_resolved_cluster_holds_the_measured_figures_without_the_file(folder: Path):
    write(folder, calibration_of(ClusterSpec.from_dict(CLUSTER)))
    cluster = ClusterSpec.from_file(folder / "cluster.yaml")

    again = ClusterSpec.from_dict(cluster.to_dict())

    assert again == cluster
    assert "calibration" not in cluster.to_dict()


def test_a_calibration_that_is_not_there_yet_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture):
    cluster = ClusterSpec.from_file(folder / "cluster.yaml")

    assert "does not exist, so figures are the catalogue's; make it with `autopar calibrate" in caplog.text
    assert cluster.device == ClusterSpec.from_dict(CLUSTER).device


def test_a_calibration_of_another_device_is_refused(folder: Path):
    write(folder, calibration_of(ClusterSpec.from_dict(CLUSTER), catalog="h100-sxm-80gb", kind="gpu"))

    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_file(folder / "cluster.yaml")

    assert "is a calibration of another machine (autopar calibrate, 2026-11-21, 2 x 1 Test CPU)" in str(caught.value)
    assert "its device is a gpu, the cluster's 'core' a cpu" in str(caught.value)


def test_a_calibration_of_another_link_is_refused_with_all_that_differs(folder: Path):
    spec = ClusterSpec.from_dict(CLUSTER)
    calibration = calibration_of(spec)
    slower = replace(calibration.levels[0], bytes_per_s=25e6)
    write(folder, replace(calibration, levels=(slower, replace(slower, name="pod"))))

    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_file(folder / "cluster.yaml")

    assert "it has level 'pod', the cluster node, rack" in str(caught.value)
    assert "its level 'rack' has 25 MB/s, the cluster's 125 MB/s" in str(caught.value)


FORMATS = [
    (
        {"catalog_format": catalog.FORMAT - 1},
        "older than the catalogue's format, which is 3; new since then: attention_half",
    ),
    ({"catalog_format": None}, "catalog_format: is None, not of the catalogue's format"),
    ({"version": 99}, "version: is 99, not of the calibration file's format, which is 1"),
]


@pytest.mark.parametrize(("changes", "message"), FORMATS, ids=[message for _, message in FORMATS])
def test_a_calibration_of_another_format_is_refused(folder: Path, changes: dict[str, Any], message: str):
    write(folder, calibration_of(ClusterSpec.from_dict(CLUSTER)), **changes)

    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_file(folder / "cluster.yaml")

    assert message in str(caught.value)
    assert "autopar calibrate" in str(caught.value)


@pytest.mark.parametrize("wrong", [0, 1.5, math.nan])
def test_a_level_with_an_impossible_efficiency_is_refused_by_its_place(folder: Path, wrong: float):
    write(folder, calibration_of(ClusterSpec.from_dict(CLUSTER)))
    file = folder / "calibration.json"
    document = json.loads(file.read_text())
    document["levels"][0]["efficiency"] = wrong
    file.write_text(json.dumps(document))

    with pytest.raises(
        ClusterError, match=rf"levels\[0\].efficiency: must be more than 0 and at most 1, but is {wrong}"
    ):
        ClusterSpec.from_file(folder / "cluster.yaml")


def test_a_file_that_is_no_json_is_refused(tmp_path: Path):
    (tmp_path / "calibration.json").write_text("{")

    with pytest.raises(ClusterError, match="is no JSON"):
        read_calibration(tmp_path / "calibration.json")


def test_new_memory_costs_from_its_size_on():
    device = true_device()

    assert fresh_s([MIB, 24 * MIB], device).tolist() == [0.0, pytest.approx(24 * MIB / 1e9)]


@pytest.mark.parametrize("op", OPS)
def test_what_a_host_spends_on_a_collective_grows_with_its_bytes_only(op: str):
    level = replace(ClusterSpec.from_dict(CLUSTER).levels[1], host_bytes_per_s=4e8)
    fast = replace(level, bytes_per_s=1e12)

    costs = [host_s(op, size, axis_hops((each,), (2,), 0)) for size in (1e6, 2e6) for each in (level, fast)]

    assert costs[0] == costs[1] > 0
    assert math.isclose(costs[2], 2 * costs[0])
