"""The cluster file: text to the parts of a cluster, and back.

The format is described in docs; what is not given is taken from the catalogue
entry of the device or from the catalogue link of the same bandwidth and
topology, and `to_dict` writes everything out, so that a resolved cluster does
not depend on the catalogue.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_models import catalog, units
from cost_models.device import DeviceSpec, catalogued_device
from cost_models.device_file import device_document, read_device
from cost_models.errors import shown, suggestion
from cost_models.node import (
    TOPOLOGIES,
    LinkSpec,
    NetworkLevel,
    NodeGroup,
    NodeSpec,
    catalogued_link,
)
from cost_models.section import Section

VERSION = 1
_TOP_KEYS = ("version", "name", "devices", "nodes", "groups", "network", "calibration", "calibrated")
_NODE_KEYS = ("preset", "device", "count", "links", "nic", "cores", "nodes_per_machine")
_HOST_KEYS = ("host_bandwidth", "efficiency_of")
_LINK_KEYS = (
    "preset",
    "bandwidth",
    "latency",
    "topology",
    "efficiency",
    "call_overhead",
    "in_switch_reduction",
    *_HOST_KEYS,
)
_NIC_KEYS = ("preset", "bandwidth", "latency", "efficiency", "call_overhead", *_HOST_KEYS)

# Where the file gives a bandwidth that no catalogue entry has. gpu: the mean of the fitted
# NVLink generations, and InfiniBand. cpu: gloo over a throttled 1 Gbit/s link, 32 MiB
# all-reduced in 0.29 s; 4 bytes gathered in 0.5 ms, reduced in 0.7 ms; 3.3 ns of a computing core a byte sent.
_DEFAULT_LINK = {
    "gpu": LinkSpec(0.0, 2.9e-6, "switch", efficiency=0.775, call_overhead_s=30e-6),
    "cpu": LinkSpec(0.0, 50e-6, "host", efficiency=0.97, call_overhead_s=200e-6),
}
_DEFAULT_NIC = {
    "gpu": LinkSpec(0.0, 5e-6, "fat-tree", efficiency=0.945, call_overhead_s=30e-6),
    "cpu": LinkSpec(0.0, 100e-6, "fat-tree", efficiency=0.97, call_overhead_s=400e-6, host_bytes_per_s=300e6),
}


@dataclass(frozen=True)
class Parts:
    """What a cluster file says, checked and in SI units."""

    name: str
    groups: tuple[NodeGroup, ...]
    network: tuple[NetworkLevel, ...]
    calibration: str
    calibrated: str = ""


def read_parts(document: object, origin: str) -> Parts:
    """Return the parts of a cluster file that was read from `origin`.

    Raises `ClusterError` with the key path for anything that is missing,
    unknown or out of range.
    """
    top = Section.of(document, origin).only(*_TOP_KEYS)
    _check_version(top)
    top.require("groups", example="groups: [{node: dgx, count: 4}]")
    devices = {name: read_device(name, top.section("devices").section(name)) for name in top.section("devices").data}
    nodes = {name: _read_node(name, top.section("nodes").section(name), devices) for name in top.section("nodes").data}
    groups = tuple(_read_group(each, nodes) for each in top.sections("groups"))
    if not groups:
        raise top.error("holds no group; give at least one, such as {node: dgx, count: 4}", "groups")
    network = tuple(_read_level(each) for each in top.sections("network"))
    _check_level_names(network, top)
    return Parts(
        name=top.text("name", "cluster"),
        groups=groups,
        network=network,
        calibration=top.text("calibration"),
        calibrated=top.text("calibrated"),
    )


def parts_document(parts: Parts) -> dict[str, Any]:
    """Return the cluster file that `read_parts` reads back as equal parts."""
    devices: dict[str, Any] = {}
    nodes: dict[str, Any] = {}
    for group in parts.groups:
        devices[group.node.device.name] = device_document(group.node.device)
        nodes[group.node.name] = _node_document(group.node)
    document: dict[str, Any] = {"version": VERSION, "name": parts.name, "devices": devices, "nodes": nodes}
    document["groups"] = [{"node": group.node.name, "count": group.count} for group in parts.groups]
    if parts.network:
        document["network"] = [_level_document(each) for each in parts.network]
    if parts.calibration:
        document["calibration"] = parts.calibration
    if parts.calibrated:
        document["calibrated"] = parts.calibrated
    return document


def preset_node(name: str) -> NodeSpec:
    """Return the node of the catalogue that is called `name`, such as `dgx-h100`."""
    entry = catalog.entry("nodes", name)
    return NodeSpec(
        name=name,
        device=catalogued_device(catalog.text(entry, "device")),
        count=int(catalog.number(entry, "count")),
        links=catalogued_link("links", catalog.text(entry, "links")),
        nic=catalogued_link("nics", catalog.text(entry, "nic")),
    )


def shorthand_node(device_name: str, count: int) -> NodeSpec:
    """Return a node of `count` catalogued devices with that device's usual links."""
    entry = catalog.entry("devices", device_name)
    return NodeSpec(
        name="node",
        device=catalogued_device(device_name),
        count=count,
        links=catalogued_link("links", catalog.text(entry, "default_link")),
        nic=catalogued_link("nics", catalog.text(entry, "default_nic")),
    )


def _check_version(top: Section) -> None:
    top.require("version", example=f"version: {VERSION}")
    if top["version"] != VERSION or isinstance(top["version"], bool):
        raise top.error(f"is {shown(top['version'])}, and this release reads version {VERSION} only", "version")


def _read_node(name: str, section: Section, devices: Mapping[str, DeviceSpec]) -> NodeSpec:
    section.only(*_NODE_KEYS)
    base = _preset(section, "nodes", preset_node)
    if base is None:
        section.require("device", "count", example="{device: h100, count: 8}")
    device = _device(section, devices) if "device" in section or base is None else base.device
    count = section.count("count") if "count" in section or base is None else base.count
    links = _read_links(section.section("links"), device) if "links" in section else base and base.links
    nic = _read_nic(section.section("nic"), device) if "nic" in section else base and base.nic
    if count > 1 and links is None:
        example = "links: {bandwidth: 450GB/s, latency: 1us, topology: switch}"
        raise section.error(f"has {count} devices and no 'links' that join them; add such as `{example}`")
    cores, machine = _read_cores(section, device)
    return NodeSpec(name, device, count, links, nic, cores, machine)


def _read_cores(section: Section, device: DeviceSpec) -> tuple[float, int]:
    """Return the cores that the ranks of one machine share, 0 for none, and of how many nodes the machine is made."""
    if "cores" not in section:
        if "nodes_per_machine" in section:
            raise section.error(
                "says which nodes share cores, but not how many; add such as `cores: 2`", "nodes_per_machine"
            )
        return 0.0, 1
    cores = section.number("cores", 0.0)
    if not 0 < cores < math.inf:
        raise section.error(f"must be more than 0, but is {shown(section['cores'])}", "cores")
    if device.kind != "cpu":
        raise section.error(
            f"are shared by ranks that compute on the CPU, and {device.name!r} is a {device.kind}; leave it out",
            "cores",
        )
    return cores, section.count("nodes_per_machine") if "nodes_per_machine" in section else 1


def _preset(section: Section, of: str, load: Any) -> Any:
    if "preset" not in section:
        return None
    name = section.text("preset")
    if name not in catalog.names(of):
        raise section.error(str(catalog.unknown_entry(of, name)), "preset")
    return load(name)


def _device(section: Section, devices: Mapping[str, DeviceSpec]) -> DeviceSpec:
    name = section.text("device")
    if name in devices:
        return devices[name]
    if name in catalog.names("devices"):
        return catalogued_device(name)
    known = [*devices, *catalog.names("devices")]
    own = ", ".join(devices) or "none"
    raise section.error(
        f"unknown device {name!r}{suggestion(name, known)}; this file defines: {own};"
        f" catalogue: {', '.join(catalog.names('devices'))}",
        "device",
    )


def _read_links(section: Section, device: DeviceSpec) -> LinkSpec:
    section.only(*_LINK_KEYS)
    base = _preset(section, "links", lambda name: catalogued_link("links", name))
    if base is None:
        section.require("bandwidth", example="bandwidth: 450GB/s")
        topology = section.choice("topology", TOPOLOGIES, _DEFAULT_LINK[device.kind].topology)
        nominal = section.positive("bandwidth", units.parse_bandwidth)
        base = _like("links", nominal, topology) if device.kind == "gpu" else None
        base = base or _DEFAULT_LINK[device.kind]
    return _override(section, base, section.choice("topology", TOPOLOGIES, base.topology))


def _read_nic(section: Section, device: DeviceSpec) -> LinkSpec:
    section.only(*_NIC_KEYS)
    base = _preset(section, "nics", lambda name: catalogued_link("nics", name))
    if base is None:
        section.require("bandwidth", example="bandwidth: 3200Gbit/s")
        base = _DEFAULT_NIC[device.kind]
    return _override(section, base, base.topology)


def _like(section: str, bytes_per_s: float, topology: str) -> LinkSpec | None:
    candidates = (catalogued_link(section, name) for name in catalog.names(section))
    return next((x for x in candidates if x.bytes_per_s == bytes_per_s and x.topology == topology), None)


def _override(section: Section, base: LinkSpec, topology: str) -> LinkSpec:
    given = {*_LINK_KEYS, "topology"} - {"preset"}
    bandwidth = "bandwidth" in section
    return LinkSpec(
        bytes_per_s=section.positive("bandwidth", units.parse_bandwidth) if bandwidth else base.bytes_per_s,
        latency_s=section.quantity("latency", units.parse_time, base.latency_s),
        topology=topology,
        efficiency=section.share("efficiency", base.efficiency),
        call_overhead_s=section.quantity("call_overhead", units.parse_time, base.call_overhead_s),
        in_switch_reduction=section.flag("in_switch_reduction", base.in_switch_reduction),
        host_bytes_per_s=section.quantity("host_bandwidth", units.parse_bandwidth, base.host_bytes_per_s),
        efficiency_of=_efficiency_of(section) if "efficiency_of" in section else base.efficiency_of,
        catalog="" if given & set(section.data) else base.catalog,
    )


def _efficiency_of(section: Section) -> dict[str, float]:
    from cost_models.collectives import OPS  # numpy: a cluster file without the key is read without it

    own = section.section("efficiency_of").only(*OPS)
    return {op: own.share(op, 1.0) for op in own.data}


def _read_group(section: Section, nodes: Mapping[str, NodeSpec]) -> NodeGroup:
    section.only("node", "count").require("node", "count", example="{node: dgx, count: 4}")
    name = section.text("node")
    if name in nodes:
        return NodeGroup(nodes[name], section.count("count"))
    if name in catalog.names("nodes"):
        return NodeGroup(preset_node(name), section.count("count"))
    known = [*nodes, *catalog.names("nodes")]
    own = ", ".join(nodes) or "none"
    raise section.error(f"unknown node {name!r}{suggestion(name, known)}; this file defines: {own}", "node")


def _read_level(section: Section) -> NetworkLevel:
    section.only("level", "topology", "oversubscription", "latency", "size", "bandwidth").require("level")
    oversubscription = section.number("oversubscription", 1.0)
    if oversubscription < 1:
        raise section.error(f"must be at least 1, but is {oversubscription:g}", "oversubscription")
    return NetworkLevel(
        name=section.text("level"),
        topology=section.choice("topology", TOPOLOGIES, "fat-tree"),
        oversubscription=oversubscription,
        latency_s=section.required_quantity("latency", units.parse_time) if "latency" in section else None,
        size=section.count("size") if "size" in section else None,
        bytes_per_s=section.positive("bandwidth", units.parse_bandwidth) if "bandwidth" in section else None,
    )


def _check_level_names(network: tuple[NetworkLevel, ...], top: Section) -> None:
    """Raise where two levels have one name; the links inside a node are the level `node`."""
    taken = {"node": "the links inside a node"}
    for index, level in enumerate(network):
        if level.name in taken:
            raise top.error(
                f"{level.name!r} is the name of {taken[level.name]} already; give each level a name of its own, such "
                "as rack, pod",
                f"network[{index}].level",
            )
        taken[level.name] = f"network[{index}]"


def _node_document(node: NodeSpec) -> dict[str, Any]:
    document: dict[str, Any] = {"device": node.device.name, "count": node.count}
    if node.links is not None:
        document["links"] = _link_document(node.links) | {
            "topology": node.links.topology,
            "in_switch_reduction": node.links.in_switch_reduction,
        }
    if node.nic is not None:
        document["nic"] = _link_document(node.nic)
    if node.cores:
        document |= {"cores": node.cores, "nodes_per_machine": node.nodes_per_machine}
    return document


def _link_document(link: LinkSpec) -> dict[str, Any]:
    return {
        "bandwidth": units.exact_bandwidth(link.bytes_per_s),
        "latency": units.exact_seconds(link.latency_s),
        "efficiency": link.efficiency,
        "call_overhead": units.exact_seconds(link.call_overhead_s),
        "host_bandwidth": units.exact_bandwidth(link.host_bytes_per_s),
        "efficiency_of": dict(link.efficiency_of),
    }


def _level_document(level: NetworkLevel) -> dict[str, Any]:
    document: dict[str, Any] = {
        "level": level.name,
        "topology": level.topology,
        "oversubscription": level.oversubscription,
    }
    if level.latency_s is not None:
        document["latency"] = units.exact_seconds(level.latency_s)
    if level.size is not None:
        document["size"] = level.size
    if level.bytes_per_s is not None:
        document["bandwidth"] = units.exact_bandwidth(level.bytes_per_s)
    return document
