"""The cluster file's JSON Schema accepts what is read and knows the same keys."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema
import pytest
import yaml

from cost_models import catalog, cluster_file, device_file
from cost_models.cluster import ClusterSpec
from cost_models.node import TOPOLOGIES

SCHEMA = json.loads(resources.files("autopar.ir").joinpath("schema/cluster.schema.json").read_text())

CONTRACT = """
version: 1
name: two-pods
devices:
  h100: {preset: h100-sxm-80gb}
  a100: {memory: {capacity: 80GiB, bandwidth: 2039GB/s}, compute: {bf16: 312TFLOP/s, fp32: 19.5TFLOP/s}}
nodes:
  dgx: {device: h100, count: 8, links: {bandwidth: 450GB/s, latency: 1us, topology: switch}, nic: {bandwidth: 3200Gbit/s, latency: 5us}}
  old: {device: a100, count: 8, links: {bandwidth: 300GB/s, latency: 1.3us, topology: switch}, nic: {bandwidth: 800Gbit/s, latency: 5us}}
groups:
  - {node: dgx, count: 4}
  - {node: old, count: 2}
network:
  - {level: pod, topology: fat-tree, oversubscription: 1, latency: 5us}
calibration: calibration.json
"""  # noqa: E501


@pytest.mark.parametrize("preset", [*catalog.names("nodes"), "cpu:4", "h100-sxm-80gb:8x4"])
def test_every_resolved_preset_fits_the_schema(preset: str):
    jsonschema.validate(ClusterSpec.parse(preset).to_dict(), SCHEMA)


def test_the_contracts_example_fits_the_schema():
    jsonschema.validate(yaml.safe_load(CONTRACT), SCHEMA)


@pytest.mark.parametrize(
    "edit",
    [
        {"groups": []},
        {"nodse": {}},
        {"version": 2},
        {"devices": {"h100": {"memory": {"capacity": 80}}}},
        {"devices": {"h100": {"memory": {"capacity": "80Gb"}}}},
        {"nodes": {"dgx": {"links": {"bandwidth": "450GB"}}}},
        {"nodes": {"dgx": {"device": "h100", "count": 8, "cores": 0}}},
    ],
)
def test_what_the_reader_refuses_the_schema_refuses(edit: dict[str, Any]):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**yaml.safe_load(CONTRACT), **edit}, SCHEMA)


@pytest.mark.parametrize(
    ("place", "keys"),
    [
        (SCHEMA, cluster_file._TOP_KEYS),
        (SCHEMA["$defs"]["node"], cluster_file._NODE_KEYS),
        (SCHEMA["$defs"]["links"], cluster_file._LINK_KEYS),
        (SCHEMA["$defs"]["nic"], cluster_file._NIC_KEYS),
        (SCHEMA["$defs"]["device"], device_file._KEYS),
        (SCHEMA["$defs"]["device"]["properties"]["memory"], device_file._MEMORY_KEYS),
    ],
)
def test_schema_and_reader_know_the_same_keys(place: dict[str, Any], keys: tuple[str, ...]):
    assert sorted(place["properties"]) == sorted(keys)


def test_schema_and_reader_know_the_same_topologies():
    assert SCHEMA["$defs"]["topology"]["enum"] == list(TOPOLOGIES)
