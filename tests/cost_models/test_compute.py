import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import catalog
from cost_models.compute import (
    accumulate_s,
    attention_s,
    causal_share,
    matmul_compute_s,
    matmul_s,
    memory_bound_s,
    narrowing_s,
    optimizer_s,
)
from cost_models.device import catalogued_device
from cost_models.errors import CostModelError
from cost_models.frameworks import stack_of
from cost_models.memory import DtypeOf, allocated_bytes, optimizer_state_bytes, optimizer_traffic_bytes
from cost_models.overlap import ACCESSES, exposed_s, overlap_efficiency
from cost_models.topology import Hop

DEVICES = catalog.names("devices")
SIZE = st.integers(min_value=1, max_value=20000)

CATALOGUED = {
    "NVIDIA A100 SXM": "a100-sxm-80gb",
    "NVIDIA A100 PCIe": "a100-pcie-80gb",
    "NVIDIA H100 SXM": "h100-sxm-80gb",
    "NVIDIA H200 SXM": "h200",
    "NVIDIA B200 SXM": "b200",
    "NVIDIA GB200 SXM": "gb200",
    "AMD MI300X": "mi300x",
}


def best_rows():
    with (Path(__file__).parents[2] / "benchmarks" / "data" / "matmul_achievable.csv").open() as file:
        for row in csv.DictReader(file):
            if row["gpu"] in CATALOGUED:
                m, n, k = (int(size) for size in row["best_shape_mxnxk"].split("x"))
                yield (
                    CATALOGUED[row["gpu"]],
                    row["dtype"].removesuffix("_e4m3fn"),
                    m,
                    n,
                    k,
                    float(row["achieved"]) * 1e12,
                )


BEST = list(best_rows())


@pytest.mark.parametrize(("device", "dtype", "m", "n", "k", "achieved"), BEST, ids=[f"{b[0]} {b[1]}" for b in BEST])
def test_the_best_published_matmul_is_reproduced_within_two_percent(device, dtype, m, n, k, achieved):
    seconds = float(matmul_s(1, m, n, k, dtype, catalogued_device(device)))

    assert 2 * m * n * k / seconds == pytest.approx(achieved, rel=0.02)


@pytest.mark.parametrize(("device", "dtype", "m", "n", "k", "achieved"), BEST, ids=[f"{b[0]} {b[1]}" for b in BEST])
def test_no_shape_is_faster_than_the_best_that_was_measured(device, dtype, m, n, k, achieved):
    del m, n, k
    rows, columns, inner = np.meshgrid([8192, 12288, 16384], [8192, 12288, 18432], [4096, 16384, 65536])

    rates = 2 * rows * columns * inner / matmul_s(1, rows, columns, inner, dtype, catalogued_device(device))

    assert rates.max() <= 1.001 * achieved


@pytest.mark.parametrize("stack", ["nemo", "pytorch"])
def test_a_cast_to_fp8_is_a_kernel_of_its_own_in_all_software(stack):
    device = stack_of(stack, compiled=False).on(catalogued_device("h100-sxm-80gb"), 2025)

    seconds = float(narrowing_s(1e9, 2, "fp8", device))

    assert seconds == pytest.approx(4e9 / (device.memory_bytes_per_s * device.memory_efficiency), rel=0.01)


@given(b=st.integers(1, 64), m=SIZE, n=SIZE, k=SIZE, device=st.sampled_from(DEVICES))
def test_a_matmul_never_exceeds_peak_nor_bandwidth(b, m, n, k, device):
    spec = catalogued_device(device)
    seconds = float(matmul_s(b, m, n, k, "float16", spec))

    assert 2 * b * m * n * k / seconds <= spec.peak_flops["float16"] if "float16" in spec.peak_flops else True
    assert 2 * b * (m * k + k * n + m * n) / seconds <= spec.memory_bytes_per_s


@given(m=SIZE, n=SIZE, k=SIZE, more=st.integers(1, 4096), device=st.sampled_from(["cpu", "h100-sxm-80gb", "mi300x"]))
def test_a_larger_matmul_is_never_faster(m, n, k, more, device):
    spec = catalogued_device(device)
    base = float(matmul_s(1, m, n, k, "float32", spec))

    for sizes in ((1, m + more, n, k), (1, m, n + more, k), (1, m, n, k + more), (2, m, n, k)):
        assert float(matmul_s(*sizes, "float32", spec)) >= base * (1 - 1e-12)


def test_matmul_sizes_broadcast():
    spec = catalogued_device("a100-sxm-80gb")
    sizes = np.array([128, 1024, 8192])

    together = matmul_s(1, sizes, 4096, sizes[:, None], "bf16", spec)

    assert together.shape == (3, 3)
    assert together[2, 0] == float(matmul_s(1, 128, 4096, 8192, "bf16", spec))


def test_batched_products_of_unaligned_rows_do_without_tensor_cores():
    device = catalogued_device("a100-sxm-80gb")
    slow, fast = (float(matmul_s(64, 2048, 2048, k, "bfloat16", device)) for k in (108, 112))
    single = [float(matmul_s(1, 2048, 2048, k, "bfloat16", device)) for k in (108, 112)]

    assert 5 < slow / fast < 16
    assert single[0] <= single[1]


def test_single_products_of_unaligned_rows_wait_for_their_loads():
    device = replace(catalogued_device("a100-sxm-80gb"), pads=False)
    found = [float(matmul_s(1, 8192, 8192, 4096, "bfloat16", device, aligned=each)) for each in (1, 2, 4, 8)]

    # 108 multiprocessors with 1 and 2 TFLOP/s each; where rows are aligned some 250 TFLOP/s in all.
    assert found[0] == pytest.approx(2 * 8192 * 8192 * 4096 / 108e12, rel=0.01)
    assert found[1] == found[2] == pytest.approx(found[0] / 2, rel=0.01)
    assert 2 < found[0] / found[3] < 3
    assert float(matmul_s(1, 8192, 8192, 4096, "float32", device, aligned=1)) == float(
        matmul_s(1, 8192, 8192, 4096, "float32", device)
    )


def test_small_work_costs_a_launch():
    gpu, cpu = catalogued_device("a100-sxm-80gb"), catalogued_device("cpu")

    assert float(matmul_s(1, 8, 8, 8, "bf16", gpu)) == gpu.kernel_launch_s
    assert float(memory_bound_s(0.0, gpu)) == gpu.kernel_launch_s
    assert float(memory_bound_s(0.0, cpu)) >= cpu.kernel_launch_s


def test_a_nearly_empty_last_wave_lowers_the_rate():
    spec = catalogued_device("a100-sxm-80gb")  # 108 multiprocessors take 256 x 128 tiles
    rows = np.array([108, 114])

    full, spilling = rows / matmul_compute_s(1, 256 * rows, 128, 1024, "bf16", spec)

    assert spilling < 0.95 * full


def test_large_memory_bound_kernels_reach_the_efficiency_of_the_device():
    spec = catalogued_device("h100-sxm-80gb")
    assert 1e11 / float(memory_bound_s(1e11, spec)) == pytest.approx(3.35e12 * spec.memory_efficiency, rel=1e-3)


def test_transcendentals_bound_a_cpu_and_not_a_gpu():
    elements = 2048**2
    for device, slower in (("cpu", True), ("a100-sxm-80gb", False)):
        spec = catalogued_device(device)
        plain, softmax = memory_bound_s(8 * elements, spec), memory_bound_s(8 * elements, spec, elements)
        assert (float(softmax) > float(plain)) is slower


def test_attention_is_bound_by_the_slower_of_arithmetic_and_memory():
    spec = catalogued_device("a100-sxm-80gb")

    assert float(attention_s(1e13, 0.0, "bf16", spec)) == pytest.approx(
        1e13 / 312e12 / spec.attention_efficiency, rel=1e-3
    )
    assert float(attention_s(0.0, 1e9, "bf16", spec)) == float(memory_bound_s(1e9, spec))


def test_attention_over_as_many_keys_as_half_the_rate_takes_twice_as_long():
    spec = replace(catalogued_device("cpu"), attention_half=50.0)

    few, many = (float(attention_s(1e12, 0.0, "float32", spec, keys)) for keys in (50, 50_000_000))

    assert few == pytest.approx(2 * many, rel=1e-3)


@pytest.mark.parametrize(
    ("keys", "block"), [(64, 512), (512, 512), (768, 512), (1024, 512), (2048, 512), (100, 1), (6, 4), (7, 2)]
)
def test_a_causal_kernel_computes_the_blocks_of_which_a_query_sees_one(keys: int, block: int):
    rows = np.arange(keys)
    computed = np.minimum((rows // block + 1) * block, keys).sum()

    assert causal_share(keys, block) == pytest.approx(0.5 if block == 1 else computed / keys**2)


OPTIMIZERS = [("none", 0, 0), ("sgd", 0, 12), ("sgd_momentum", 4, 20), ("adam", 8, 28), ("adamw", 8, 28)]


@pytest.mark.parametrize(("name", "state", "fused_traffic"), OPTIMIZERS, ids=[o[0] for o in OPTIMIZERS])
def test_optimizer_bytes_per_parameter(name, state, fused_traffic):
    assert optimizer_state_bytes(name) == state
    assert optimizer_traffic_bytes(name, implementation="fused") == fused_traffic
    assert optimizer_traffic_bytes(name, implementation="foreach") >= fused_traffic


def test_a_master_copy_adds_its_bytes():
    mixed = DtypeOf(parameter="bf16", gradient="bf16", state="float32", master="float32")

    assert optimizer_state_bytes("adamw", mixed) == 12
    cast_and_clipped = 4 * 4
    assert optimizer_traffic_bytes("adamw", mixed, "fused") == 2 * 4 + 2 + 4 * 4 + 2 + cast_and_clipped


def test_complex_parameters_have_states_of_pairs():
    pairs = DtypeOf(parameter="complex64", gradient="complex64", state="complex64")

    assert optimizer_state_bytes("adamw", pairs) == 2 * optimizer_state_bytes("adamw")


def test_an_optimizer_step_is_memory_bound():
    spec = catalogued_device("a100-sxm-80gb")
    expected = 28e9 / (2039e9 * spec.memory_efficiency)
    assert float(optimizer_s(1e9, "adamw", spec, implementation="fused")) == pytest.approx(expected, rel=1e-3)


def test_a_product_that_adds_to_the_sum_itself_only_reads_it():
    apart = replace(catalogued_device("h100-sxm-80gb"), memory_half_bytes=0.0)
    inside = replace(apart, sums_in_products=True)

    assert float(accumulate_s(1e9, apart)) == pytest.approx(3 * float(accumulate_s(1e9, inside)))


def test_allocations_are_rounded_up():
    assert allocated_bytes(np.array([0, 1, 512, 513])).tolist() == [0, 512, 512, 1024]
    assert float(allocated_bytes(1, "cpu")) == 64


def test_exposed_communication_is_what_computation_does_not_hide():
    assert exposed_s(np.array([1.0, 2.0]), 1.0, 0.5).tolist() == [0.5, 1.5]
    assert float(exposed_s(0.1, 1.0, 0.5)) == 0.0


def test_nothing_overlaps_on_loopback():
    cpu = catalogued_device("cpu")
    assert overlap_efficiency(cpu, (), "host") == 0.0
    assert overlap_efficiency(cpu, (), "fat-tree") == 0.81


def test_a_collective_takes_of_a_gpu_what_its_bytes_pass_through_memory():
    gpu = catalogued_device("a100-sxm-80gb")
    bandwidth = gpu.memory_bytes_per_s * gpu.memory_efficiency
    fast, slow = (Hop(8, rate, 1e-6, "rack", efficiency=0.5) for rate in (200e9, 50e9))

    lost = [1.0 - overlap_efficiency(gpu, hops, "switch") for hops in ((fast,), (slow,), (fast, slow))]

    assert lost[0] == pytest.approx(float(ACCESSES["gpu"].value) * 100e9 / bandwidth)
    assert lost[0] == pytest.approx(4 * lost[1])
    assert lost[2] == lost[1], "a ring goes at the pace of its slowest link"
    assert overlap_efficiency(gpu, (replace(fast, bytes_per_s=1e13),), "switch") == 0.0


WRONG = [
    (lambda: optimizer_state_bytes("adamm"), "unknown optimizer 'adamm' (did you mean 'adam'?); known: none, sgd"),
    (
        lambda: optimizer_traffic_bytes("adam", implementation="fuse"),
        "unknown implementation 'fuse' (did you mean 'fused'",
    ),
    (
        lambda: optimizer_state_bytes("adam", DtypeOf(state="flot32")),
        "unknown data type 'flot32' (did you mean 'float32'?)",
    ),
    (
        lambda: overlap_efficiency(replace(catalogued_device("t4"), kind="tpu"), (), "switch"),
        "no overlap efficiency for device kind 'tpu'; known: gpu, cpu",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_names_are_refused_with_the_known_ones(call, message):
    with pytest.raises(CostModelError) as caught:
        call()

    assert message in str(caught.value)
