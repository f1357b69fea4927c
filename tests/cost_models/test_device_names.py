import pytest

from cost_models import catalog
from cost_models.device_file import read_device
from cost_models.device_names import catalogued_name, series_of
from cost_models.errors import ClusterError
from cost_models.section import Section

SPELLINGS = {
    "H200-SXM-141GB": "h200",
    "v100-sxm2-32gb": "v100-32gb",
    "V100-SXM3-32GB": "v100-sxm3-32gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "a100-40gb-sxm": "a100-sxm-40gb",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "b200-sxm-192gb": "b200",
    "b200-180gb": "b200",
    "NVIDIA H100 80GB HBM3 SXM": "h100-sxm-80gb",
    "AMD Instinct MI300X": "mi300x",
    "mi250x-64gb": "mi250x",
    "a10g-24gb": "a10g",
    "NVIDIA GH200 120GB": "gh200-96gb",
    "GH200-480GB": "gh200-96gb",
}


@pytest.mark.parametrize(("text", "name"), SPELLINGS.items())
def test_devices_are_known_as_makers_and_clouds_write_them(text, name):
    assert catalogued_name(text) == name


@pytest.mark.parametrize("name", catalog.names("devices"))
def test_every_device_is_known_by_its_own_name_in_capitals(name):
    assert catalogued_name(name.upper()) == name


@pytest.mark.parametrize("text", ["a100", "h100", "h100-80gb", "v100", "h200-80gb", "h200-pcie", "tpu-v9", "mi300"])
def test_what_may_be_several_devices_or_none_is_refused(text):
    with pytest.raises(ClusterError, match="device"):
        catalogued_name(text)


@pytest.mark.parametrize(
    ("text", "series"),
    [
        ("mi350x", "mi"),
        ("AMD Instinct MI350X", "mi"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx"),
        ("tpu-v5p", "tpu"),
        ("gaudi2", "gaudi"),
        ("accelerator", ""),
        ("my-gpu", ""),
    ],
)
def test_a_series_is_the_letters_before_a_number(text: str, series: str):
    assert series_of(text) == series


@pytest.mark.parametrize(
    ("name", "peak", "bandwidth", "like"),
    [
        ("mi350x", "2306TFLOP/s", "8TB/s", "mi355x"),
        ("rtx-3090-ti", "80TFLOP/s", "1008GB/s", "rtx-3090"),
        ("gaudi2", "432TFLOP/s", "2450GB/s", "a100-sxm-80gb"),
        ("mi1", "2TFLOP/s", "100GB/s", "a100-sxm-80gb"),
    ],
)
def test_a_described_device_is_computed_like_the_nearest_of_its_series(name: str, peak: str, bandwidth: str, like: str):
    figures = {"memory": {"capacity": "32GiB", "bandwidth": bandwidth}, "compute": {"bf16": peak}}
    described, known = (read_device(name, Section.of(document, "a file")) for document in (figures, {"preset": like}))

    if like != "a100-sxm-80gb":
        assert described.matmul_efficiency_for("bf16") == known.matmul_efficiency_for("bf16")
    assert described.attention_efficiency == known.attention_efficiency
    assert described.memory_efficiency == known.memory_efficiency
    assert described.multiprocessors == 0


def test_figures_of_another_series_make_no_twin():
    """An MI100 has the bandwidth and the float32 rate of a TPU v4."""
    figures = {"memory": {"capacity": "32GiB", "bandwidth": "1228GB/s"}, "compute": {"fp32": "46TFLOP/s"}}

    described = read_device("mi100", Section.of(figures, "a file"))

    assert described.kernel_launch_s == read_device("mi210", Section.of({"preset": "mi210"}, "a file")).kernel_launch_s
