import pytest

from cost_models import catalog
from cost_models.catalog import Figure
from cost_models.cluster import ClusterSpec
from cost_models.device import catalogued_device, sources
from cost_models.errors import ClusterError, CostModelError

SECTIONS = ("devices", "nodes", "links", "nics", "libraries")
ENTRIES = [(section, name) for section in SECTIONS for name in catalog.names(section)]
PROMISED = (
    *("v100-16gb", "v100-32gb", "gh200-96gb", "a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-40gb", "a100-pcie-80gb"),
    *("h100-sxm-80gb", "h100-pcie-80gb", "h100-sxm-96gb-hbm2e", "h200", "gh200", "b200", "b300", "gb200"),
    *(
        "v100-sxm3-32gb",
        "h100-nvl-94gb",
        "h20-96gb",
        "a6000",
        "rtx-3090",
        "rtx-5090",
        "a10",
        "l40",
        "t4",
        "mi250",
        "mi210",
    ),
    *("l4", "l40s", "a10g", "rtx-4090", "mi250x", "mi300x", "mi325x", "mi355x", "cpu"),
)


@pytest.mark.parametrize(("section", "name"), ENTRIES, ids=[f"{s}.{n}" for s, n in ENTRIES])
def test_every_figure_has_unit_source_and_kind(section, name):
    for key, each in catalog.entry(section, name).items():
        for found in [each] if isinstance(each, Figure) else each.values():
            assert found.unit, key
            assert len(found.source) > 8, key
            assert found.kind in catalog.KINDS, key


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_device_makes_a_cluster_of_nodes(name):
    cluster = ClusterSpec.parse(f"{name}:4x2")

    assert cluster.device == catalogued_device(name)
    assert [level.fanout for level in cluster.levels] == [4, 2]
    assert all(level.bytes_per_s > 0 and level.efficiency <= 1 for level in cluster.levels)


@pytest.mark.parametrize("name", catalog.names("nodes"))
def test_every_node_preset_makes_a_cluster(name):
    assert ClusterSpec.parse(name).levels[0].fanout == ClusterSpec.parse(name).device_count


def test_the_loader_turns_3_35_terabytes_into_exactly_3_35e12_bytes():
    assert catalogued_device("h100-sxm-80gb").memory_bytes_per_s == 3.35e12


def test_compute_figures_are_dense():
    assert catalogued_device("a100-sxm-80gb").peak_flops["bfloat16"] == 312e12
    assert catalogued_device("h100-sxm-80gb").peak_flops["bfloat16"] == 989.4e12
    assert catalogued_device("h100-sxm-80gb").flops_for("fp32") == 66.9e12
    assert catalogued_device("h100-sxm-80gb").flops_for("tf32") == 494.7e12


@pytest.mark.parametrize("name", PROMISED)
def test_wider_types_are_never_faster(name):
    peaks = catalogued_device(name).peak_flops
    order = [dtype for dtype in ("float64", "float32", "tf32", "float16", "fp8") if dtype in peaks]
    rates = [peaks[dtype] for dtype in order]
    assert name == "cpu" or rates == sorted(rates)


def test_the_source_of_a_figure_can_be_asked_for():
    assert sources(catalogued_device("h200"))["memory_bandwidth"].startswith("datasheet: NVIDIA H200")
    assert "compute.bfloat16" in sources(catalogued_device("h200"))


def test_a_type_without_rate_is_refused_with_the_known_ones():
    with pytest.raises(CostModelError, match=r"'v100-16gb' has no compute rate for 'bf16'; known: float16, float32"):
        catalogued_device("v100-16gb").flops_for("bf16")


def test_an_unknown_device_is_refused_with_the_closest():
    with pytest.raises(ClusterError, match=r"unknown device preset 'h100-sxm-80g' \(did you mean 'h100-sxm-80gb'\?\)"):
        catalogued_device("h100-sxm-80g")
