"""What software makes of a device where the device is no GPU, and of racks that one domain of links joins."""

from __future__ import annotations

import pytest

from cost_models.device import catalogued_device
from cost_models.frameworks import stack_of
from cost_models.training_rows import read_training_row, training_cluster
from tests.support.training_row import ROW

SLICE = {
    **ROW, "framework": "maxtext", "device": "tpu-v5p", "gpus": "64", "gpus_per_node": "4", "dp": "64", "tp": "1",
    "pp": "1", "year": "2024", "global_batch": "64", "inter_node_Gbit_per_s_per_node": "",
    "intra_node_GB_per_s_per_gpu": "", "fabric_note": "",
}  # fmt: skip


@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5e", "tpu-v5p"])
def test_a_tpu_keeps_its_clock_and_is_programmed_as_its_predecessors(name: str):
    device = catalogued_device(name)

    rate = stack_of("maxtext", compiled=True).on(device, 2024).matmul_efficiency_for("bf16")

    assert rate == device.matmul_efficiency_for("bf16")


def test_the_first_wide_arrays_are_new_to_software():
    rates = [
        stack_of("maxtext", compiled=True).on(catalogued_device("tpu-v6e"), year).matmul_efficiency_for("bf16")
        for year in (2024, 2026)
    ]

    assert rates[0] < rates[1] == catalogued_device("tpu-v6e").matmul_efficiency_for("bf16")


def test_what_one_domain_of_links_joins_needs_no_rate_between_nodes():
    cluster = training_cluster(read_training_row(SLICE))

    assert (cluster.node_count, cluster.devices_per_node) == (1, 64)
