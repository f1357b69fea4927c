import copy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cost_models import catalog
from cost_models.calibration import read_calibration
from cost_models.cluster import ClusterSpec
from cost_models.detect import recognise
from cost_models.device import catalogued_device
from cost_models.errors import ClusterError
from cost_models.units import parse_bytes

# The example of the contract.
TWO_PODS = """
version: 1
name: two-pods
devices:
  h100: {preset: h100-sxm-80gb}
  a100: {memory: {capacity: 80GiB, bandwidth: 2039GB/s}, compute: {bf16: 312TFLOP/s, fp32: 19.5TFLOP/s}}  # dense
nodes:
  dgx: {device: h100, count: 8, links: {bandwidth: 450GB/s, latency: 1us, topology: switch},
        nic: {bandwidth: 3200Gbit/s, latency: 5us}}
  old: {device: a100, count: 8, links: {bandwidth: 300GB/s, latency: 1.3us, topology: switch},
        nic: {bandwidth: 800Gbit/s, latency: 5us}}
groups:                                  # order is rank order
  - {node: dgx, count: 4}
  - {node: old, count: 2}
network:                                 # levels outside the node, inner to outer
  - {level: pod, topology: fat-tree, oversubscription: 1, latency: 5us}
calibration: calibration.json            # optional
"""


def two_pods() -> ClusterSpec:
    return ClusterSpec.from_dict(yaml.safe_load(TWO_PODS), origin="two-pods.yaml")


def edited(path: str, value: object) -> object:
    """The example with the value at `path` replaced; `...` removes it."""
    document = yaml.safe_load(TWO_PODS)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    place = document
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = copy.deepcopy(value)
    return document


def test_the_example_of_the_contract_is_read():
    cluster = two_pods()

    assert (cluster.device_count, cluster.node_count, cluster.devices_per_node) == (48, 6, 8)
    assert not cluster.is_homogeneous
    assert cluster.groups[1].node.device.peak_flops == {"bfloat16": 312e12, "float32": 19.5e12}
    assert cluster.calibration == "calibration.json"


def test_levels_of_unlike_nodes_are_the_slowest():
    node, pod = two_pods().levels

    assert (node.name, node.fanout, node.bytes_per_s, node.latency_s) == ("node", 8, 300e9, 1.3e-6)
    assert (pod.name, pod.fanout, pod.bytes_per_s, pod.latency_s) == ("pod", 6, 100e9, 5e-6)
    assert not node.in_switch_reduction


def test_groups_split_into_homogeneous_clusters():
    fast, slow = two_pods().split_groups()

    assert (fast.device.name, fast.device_count, slow.device.name, slow.device_count) == ("h100", 32, "a100", 16)


def test_a_mixed_cluster_has_no_one_device():
    with pytest.raises(ClusterError, match=r"no one device: 4 x dgx \(8 x h100\), 2 x old \(8 x a100\); ask one group"):
        _ = two_pods().device


def test_nodes_of_unlike_sizes_have_no_levels():
    cluster = ClusterSpec.from_dict(edited("nodes/old/count", 4))

    with pytest.raises(ClusterError, match=r"no one devices per node: 4 x dgx \(8 x h100\), 2 x old \(4 x a100\)"):
        _ = cluster.levels


@pytest.mark.parametrize(
    "text", ["cpu:4", "cpu:1x2", "h100-sxm-80gb:8x4", "dgx-a100-80gb", "dgx-h100x16", *catalog.names("nodes")]
)
def test_a_resolved_cluster_reads_back_equal(text):
    cluster = ClusterSpec.parse(text)

    again = ClusterSpec.from_dict(cluster.to_dict())

    assert again == cluster
    assert again.to_dict() == cluster.to_dict()
    assert again.fingerprint() == cluster.fingerprint()
    assert again.levels == cluster.levels


def test_a_resolved_cluster_survives_yaml(tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(two_pods().to_dict()))

    assert ClusterSpec.parse(path) == two_pods()
    assert ClusterSpec.parse(str(path)).fingerprint() == two_pods().fingerprint()


def test_the_fingerprint_tells_clusters_apart():
    texts = ("cpu:4", "cpu:8", "dgx-h100", "dgx-h200", "dgx-h100x2")
    assert len({ClusterSpec.parse(text).fingerprint() for text in texts}) == len(texts)


def test_shorthand_counts_devices_and_nodes():
    assert ClusterSpec.parse("cpu:4").device_count == 4
    assert [level.fanout for level in ClusterSpec.parse("h100-sxm-80gb:8x4").levels] == [8, 4]
    assert ClusterSpec.parse("dgx-h100x4").device_count == 32


@pytest.mark.parametrize("text", ["dgx-h100:4", "dgx-h100:8x4", "dgx-h100:x4"])
def test_a_node_preset_in_place_of_a_device_is_told_how_nodes_are_counted(text):
    with pytest.raises(ClusterError, match=r"'dgx-h100' for a device; dgx-h100x4 is so many of these nodes"):
        ClusterSpec.parse(text)


def test_a_described_device_takes_efficiencies_of_its_catalogue_twin():
    described = two_pods().groups[1].node.device

    assert described.multiprocessors == 108
    assert described.matmul_efficiency_for("bf16") == ClusterSpec.parse("dgx-a100-80gb").device.matmul_efficiency_for(
        "bf16"
    )


def test_outer_levels_share_adapters_by_oversubscription():
    document = edited("network", [{"level": "rack", "size": 2}, {"level": "pod", "oversubscription": 4}])
    rack, pod = ClusterSpec.from_dict(document).levels[1:]

    assert (rack.fanout, rack.bytes_per_s) == (2, 100e9)
    assert (pod.fanout, pod.bytes_per_s) == (3, 100e9 * 2 / 4)


BAD_FILES = [
    ("version", ..., "c.yaml: missing 'version', such as `version: 1`"),
    ("version", 2, "c.yaml: version: is 2, and this release reads version 1 only"),
    ("groups", ..., "c.yaml: missing 'groups', such as `groups: [{node: dgx, count: 4}]`"),
    ("groups", [], "c.yaml: groups: holds no group"),
    ("groups", {}, "c.yaml: groups: must be a list, not {}"),
    ("nodez", {}, "c.yaml: unknown key 'nodez' (did you mean 'nodes'?); known keys: version, name"),
    ("nodes/dgx/link", {}, "c.yaml: nodes.dgx: unknown key 'link' (did you mean 'links'?)"),
    (
        "nodes/dgx/links/bandwith",
        "1GB/s",
        "c.yaml: nodes.dgx.links: unknown key 'bandwith' (did you mean 'bandwidth'?)",
    ),
    ("nodes/dgx/links/bandwidth", 450, "c.yaml: nodes.dgx.links.bandwidth: 450 has no unit"),
    (
        "nodes/dgx/links/bandwidth",
        "450GB",
        "nodes.dgx.links.bandwidth: unknown unit 'GB' of '450GB' for a bandwidth (did",
    ),
    ("nodes/dgx/links/bandwidth", "0GB/s", "nodes.dgx.links.bandwidth: must be more than 0, but is '0GB/s'"),
    ("nodes/dgx/links/latency", "-1us", "nodes.dgx.links.latency: must not be negative, but is '-1us'"),
    (
        "nodes/dgx/links/topology",
        "swich",
        "unknown topology 'swich' (did you mean 'switch'?); known: switch, mesh, cube-mesh",
    ),
    ("nodes/dgx/links", {}, "nodes.dgx.links: missing 'bandwidth', such as `bandwidth: 450GB/s`"),
    ("nodes/dgx/links", ..., "nodes.dgx: has 8 devices and no 'links' that join them"),
    ("nodes/dgx/nic", ..., "c.yaml: node 'dgx' has no 'nic', but the cluster has 6 nodes; add such as `nic: {"),
    (
        "nodes/dgx/device",
        "h10",
        "nodes.dgx.device: unknown device 'h10' (did you mean 'h100'?); this file defines: h100, a",
    ),
    ("nodes/dgx/device", ..., "nodes.dgx: missing 'device', such as `{device: h100, count: 8}`"),
    ("nodes/dgx/count", 0, "nodes.dgx.count: must be at least 1, but is 0"),
    ("nodes/dgx/count", -8, "nodes.dgx.count: must be at least 1, but is -8"),
    ("nodes/dgx/count", 8.0, "nodes.dgx.count: must be a whole number, but is 8.0"),
    ("nodes/dgx/count", True, "nodes.dgx.count: must be a whole number, but is True"),
    ("groups/0/count", "4", "groups[0].count: must be a whole number, but is '4'"),
    (
        "groups/0/node",
        "dgxx",
        "groups[0]: node: unknown node 'dgxx' (did you mean 'dgx'?); this file defines: dgx, old",
    ),
    ("groups/1", {"node": "old"}, "groups[1]: missing 'count', such as `{node: dgx, count: 4}`"),
    ("groups/1", "old", "groups[1] must be a mapping of names, not 'old'"),
    (
        "devices/h100/preset",
        "h100-sxm",
        "devices.h100.preset: unknown device preset 'h100-sxm' (did you mean 'h100-sxm-80gb'",
    ),
    (
        "devices/h100/memory",
        {"capacity": "800GiB"},
        "devices.h100.memory.capacity: 800.00 GiB is 10 times the 79.65 GiB of h100-sxm-80gb; check the unit, or",
    ),
    (
        "devices/h100/memory",
        {"bandwidth": "33TB/s"},
        "devices.h100.memory.bandwidth: 33 TB/s is 9.85 times the 3.35 TB/s of h100-sxm-80gb",
    ),
    ("name", [[[[["deep"]]]]], "name: must be text, but is [[[[...]]]]"),
    ("version", ["x" * 1000], "version: is ['xxxxxxxx"),
    ("devices/a100/memory/capacity", "80", "devices.a100.memory.capacity: '80' has no unit"),
    ("devices/a100/memory", ..., "devices.a100: missing 'memory', such as `{preset: h100-sxm-80gb}`"),
    ("devices/a100/memory/bandwidth", ..., "devices.a100.memory: missing 'bandwidth', such as `{capacity: 80GiB"),
    ("devices/a100/compute", {}, "devices.a100.compute: names no rate; give at least one, such as {bf16: 312TFLOP/s}"),
    ("devices/a100/compute/bf61", "1TFLOP/s", "devices.a100.compute: unknown data type 'bf61' (did you mean 'bf16'?)"),
    ("devices/a100/compute/bfloat16", "312TFLOP/s", "compute: gives bfloat16 twice, the second time as 'bfloat16'"),
    (
        "devices/a100/matmul_efficiency",
        {"bf16": 1.5},
        "matmul_efficiency.bf16: must be more than 0 and at most 1, but is 1.5",
    ),
    ("devices/a100/attention_half", -3, "devices.a100.attention_half: must be a number of keys, 0 where any number is"),
    ("devices/a100/transcendentals_per_second", -1, "transcendentals_per_second: must be a number a second, 0 where"),
    ("devices/a100/attention_block", 0, "devices.a100.attention_block: must be at least 1, but is 0"),
    ("network/0/oversubscription", 0.5, "network[0].oversubscription: must be at least 1, but is 0.5"),
    ("network/0/oversubscription", float("nan"), "network[0].oversubscription: must be finite, but is nan"),
    ("network/0/level", "node", "network[0].level: 'node' is the name of the links inside a node already"),
    ("network", [{"level": "a", "size": 2}, {"level": "a"}], "network[1].level: 'a' is the name of network[0] already"),
    ("devices/a100/memory/capacity", "1e400GiB", "memory.capacity: '1e400GiB' is too large for a size in bytes"),
    ("nodes/dgx/links/bandwidth", "1e999999999GB/s", "links.bandwidth: '1e999999999GB/s' is too large for a bandwidth"),
    ("groups/0/count", 10**20, "groups[0].count: must be at most 1,000,000, but is 100,000,000,000,000,000,000"),
    ("nodes", {3: {}}, "nodes: key 3 is no text; write it in quotes"),
    ("network/0/size", 4, "c.yaml: network levels (pod 4) do not make up the 6 nodes of the groups"),
    ("network", [{"level": "rack"}, {"level": "pod"}], "network level 'rack' is not the outermost and needs 'size'"),
    ("network", [{"level": "rack", "size": 4}, {"level": "pod"}], "(rack 4 x pod ?) do not make up the 6 nodes"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD_FILES, ids=[f"{p}={v}" for p, v, _ in BAD_FILES])
def test_a_wrong_cluster_file_is_refused_with_key_path_and_way_out(path, value, message):
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_dict(edited(path, value), origin="c.yaml")

    assert message.replace("groups[0]: node:", "groups[0].node:") in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            "name: two-pods",
            "name: two-pods\nname: other",
            "c.yaml: name: given twice, in line 3 and in line 4",
        ),
        ("count: 4}", "count: 4, count: 2}", "c.yaml: groups[0].count: given twice, in line 13 and in line 13"),
        ("groups:", "nodes: {}\ngroups:", "c.yaml: nodes: given twice, in line 7 and in line 12"),
    ],
)
def test_a_key_that_is_given_twice_is_refused_with_both_lines(tmp_path, monkeypatch, first, second, message):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(TWO_PODS.replace(first, second, 1))

    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_file("c.yaml")

    assert message in str(caught.value)


def test_yaml_may_say_one_mapping_in_several_places(tmp_path):
    text = TWO_PODS.replace("old: {device", "old: {<<: *dgx, device").replace("dgx: {device", "dgx: &dgx {device")
    path = tmp_path / "c.yaml"
    path.write_text(text)

    assert ClusterSpec.from_file(path).device_count == 48


@pytest.mark.parametrize("text", ["cpu:99999999", "h100-sxm-80gb:8x99999999999999999999", "cpu:" + "9" * 5000])
def test_a_shorthand_of_more_devices_than_there_can_be_is_refused(text):
    with pytest.raises(ClusterError, match="must be at most 1,000,000"):
        ClusterSpec.parse(text)


SPARSE = [
    (
        "devices/a100/compute/bf16",
        "624TFLOP/s",
        "devices.a100.compute.bf16: 624 TFLOP/s is the figure of a100-sxm-80gb with 2:4 sparsity, twice its dense",
    ),
    ("devices/a100/compute/tf32", "312TFLOP/s", "devices.a100.compute.tf32: 312 TFLOP/s is the figure of a100"),
    ("devices/h100/compute", {"bf16": "1979TFLOP/s"}, "1.979 PFLOP/s is the figure of h100-sxm-80gb with 2:4 sparsity"),
    (
        "devices/h100/compute",
        {"bf16": "1400TFLOP/s"},
        "1.4 PFLOP/s is 1.41 times the dense 989.4 TFLOP/s of h100-sxm-80gb",
    ),
    (
        "devices/a100/compute/bf16",
        "312PFLOP/s",
        "312 PFLOP/s is 124 times the dense 2.517 PFLOP/s of mi355x; check the unit",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), SPARSE, ids=[m for _, _, m in SPARSE])
def test_sparse_and_impossible_compute_is_refused(path, value, message):
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_dict(edited(path, value), origin="c.yaml")

    assert message in str(caught.value)


def test_sparse_compute_is_recognised_by_memory_where_the_name_says_nothing():
    device = {"memory": {"capacity": "80GiB", "bandwidth": "3.35TB/s"}, "compute": {"bf16": "1979TFLOP/s"}}
    document = edited("devices/fast", device)

    with pytest.raises(ClusterError, match="h100-sxm-80gb with 2:4 sparsity"):
        ClusterSpec.from_dict(document)


@pytest.mark.parametrize("device", [{"preset": "cpu"}, {"kind": "cpu"}], ids=["preset", "kind"])
@pytest.mark.parametrize("rate", [150, 194, 400])
def test_a_core_may_do_any_multiple_of_what_the_core_of_the_catalogue_does(rate, device):
    memory = {"capacity": "4GiB", "bandwidth": "36GB/s"}
    document = edited("devices/core", {**device, "memory": memory, "compute": {"float32": f"{rate}GFLOP/s"}})
    document["nodes"]["old"]["device"] = "core"

    assert ClusterSpec.from_dict(document).devices[-1].peak_flops["float32"] == rate * 1e9


BAD_TEXTS = [
    ("dgx-h10", "'dgx-h10' is no cluster (did you mean 'dgx-h100'?); give a YAML file, a preset (dgx-1-v100"),
    ("h100-sxm-80g:8", "unknown device preset 'h100-sxm-80g' (did you mean 'h100-sxm-80gb'?)"),
    ("cpu:0", "cluster 'cpu:0': the number of devices per node must be a whole number of at least 1, but is '0'"),
    ("cpu:-1", "the number of devices per node must be a whole number of at least 1, but is '-1'"),
    ("cpu:4x0", "cluster 'cpu:4x0': the number of nodes must be a whole number of at least 1, but is '0'"),
    ("cpu:4x", "the number of nodes must be a whole number of at least 1, but is ''"),
    ("dgx-h100xtwo", "cluster 'dgx-h100xtwo': the number of nodes must be a whole number of at least 1, but is 'two'"),
    ("nowhere.yaml", "cluster file 'nowhere.yaml' cannot be read: No such file or directory; give a YAML file"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS, ids=[t for t, _ in BAD_TEXTS])
def test_a_wrong_cluster_text_is_refused_with_the_ways_to_write_one(text, message):
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.parse(text)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [", r"is no YAML: expected the node content, .* in line 2, column 5"),
        ("\tname: x", r"is no YAML: found character '\\t' that cannot start any token .* in line 1, column 1"),
        ("- 1", "the document must be a mapping"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)

    with pytest.raises(ClusterError, match=message):
        ClusterSpec.parse(path)


def test_this_machine_is_detected():
    cluster = ClusterSpec.detect()

    assert cluster.device_count >= 1
    assert ClusterSpec.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize(
    ("name", "memory_mib", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-sxm-40gb"),
        ("NVIDIA A100-PCIE-40GB", 40960, "a100-pcie-40gb"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm-80gb"),
        ("NVIDIA H200", 143771, "h200"),
        ("Tesla V100-SXM2-16GB", 16160, "v100-16gb"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
    ],
)
def test_devices_are_recognised_by_their_driver_names(name, memory_mib, found):
    assert recognise(name, memory_mib) == found


def test_an_unrecognised_device_is_refused_with_the_way_out():
    with pytest.raises(ClusterError, match="no device 'Quadro K600'.* describe it in a cluster file"):
        recognise("Quadro K600", 1024)


def test_importing_the_cluster_loads_neither_sympy_nor_numpy_nor_torch():
    code = "import sys, cost_models.cluster; print({'sympy', 'numpy', 'torch', 'autopar'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_best_rate_of_products_is_the_presets_until_the_file_says_efficiencies_of_its_own():
    def best(**more: object) -> object:
        document = edited("devices/h100", {"preset": "h100-sxm-80gb", **more})
        found = ClusterSpec.from_dict(document)
        assert ClusterSpec.from_dict(found.to_dict()).groups[0].node.device == found.groups[0].node.device
        return found.groups[0].node.device.matmul_best

    assert best() == catalogued_device("h100-sxm-80gb").matmul_best
    assert best(matmul_efficiency={"bf16": 0.95}) == {}
    assert best(matmul_efficiency={"bf16": 0.95}, matmul_best={"bf16": 0.9}) == {"bfloat16": 0.9}
    with pytest.raises(ClusterError, match="unknown data type 'bg16'"):
        best(matmul_best={"bg16": 0.9})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml: the file is empty; `autopar cluster show cpu:4` prints an example"),
        ("# nothing yet\n", "c.yaml: the file is empty; `autopar cluster show cpu:4` prints an example"),
        ("version: 1\ndevices:\ngroups: []\n", "c.yaml: devices has nothing below it; fill it in, or leave it out"),
        (
            "version: 1\n---\nversion: 1\n",
            "c.yaml: is no YAML: expected a single document in the stream but found another document, "
            "in line 2, column 1",
        ),
    ],
)
def test_files_that_say_nothing_or_twice_are_told(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "c.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_file("c.yaml")

    assert str(caught.value) == message


@pytest.mark.parametrize("memory", [{"capacity": "40GiB"}, {"capacity": "94GiB", "bandwidth": "3.9TB/s"}], ids=str)
def test_a_preset_may_be_given_the_memory_of_a_part_or_of_a_near_relative(memory):
    device = ClusterSpec.from_dict(edited("devices/h100/memory", memory)).groups[0].node.device

    assert device.memory_bytes == parse_bytes(memory["capacity"])


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ("{a: ", "}")], ids=["lists", "mappings"])
def test_a_file_that_nests_without_end_is_told_as_that(tmp_path: Path, begin: str, end: str):
    path = tmp_path / "deep.yaml"
    path.write_text(f"version: 1\nname: {begin * 3000}{end * 3000}\n")

    with pytest.raises(ClusterError, match="is no cluster file: it nests hundreds of lists or mappings"):
        ClusterSpec.from_file(path)


def test_a_calibration_that_nests_without_end_is_told_as_that(tmp_path: Path):
    (tmp_path / "calibration.json").write_text("[" * 100_000)

    with pytest.raises(ClusterError, match="nests thousands of lists or objects"):
        read_calibration(tmp_path / "calibration.json")
