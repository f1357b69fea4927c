import pytest

from cost_models import catalog
from cost_models.device_names import catalogued_name
from cost_models.errors import ClusterError

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
