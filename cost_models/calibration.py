"""The calibration file: what `autopar calibrate` found on a machine, and a cluster that takes its figures from it.

A file says which machine it is of (kind and catalogue entry of the device, nominal bandwidth and topology of levels)
and holds constants of the cost model's formulas, each with unit, kind `measured`, source, spread and error. It is put
into a cluster only if that describes the same machine; what differs is told.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models import catalog, units
from cost_models.calibration_fit import Fitted
from cost_models.collectives import OPS
from cost_models.device import DeviceSpec
from cost_models.errors import ClusterError
from cost_models.node import Level, LinkSpec, NetworkLevel, NodeGroup, NodeSpec
from cost_models.section import Section

VERSION = 1
_SAME = 0.02
"""Relative difference up to which two nominal bandwidths are the same."""

_MACHINE_KEYS = ("hardware", "kind", "catalog", "library", "nodes", "devices_per_node", "date", "torch")
_CORES_KEYS = ("cores", "nodes_per_machine")


@dataclass(frozen=True)
class Machine:
    """What was measured, and when."""

    hardware: str
    """As it calls itself."""

    kind: str
    catalog: str
    """Catalogue entry that the cluster takes it for, or the cluster's own name of it."""

    library: str
    nodes: int
    devices_per_node: int
    date: str
    torch: str = ""
    cores: float = 0.0
    """How many devices' worth of work a machine's ranks did at once, see `NodeSpec.cores`; 0: not measured, and figures
    are those of devices while all compute. Else they are those of one that computes alone."""

    nodes_per_machine: int = 1

    @property
    def machine_devices(self) -> int:
        """Return the devices of one machine."""
        return self.devices_per_node * self.nodes_per_machine

    def __str__(self) -> str:
        """Return one phrase for the source of figures."""
        return f"autopar calibrate, {self.date[:10]}, {self.nodes} x {self.devices_per_node} {self.hardware}"


@dataclass(frozen=True)
class LevelFigures:
    """Constants of one link level."""

    name: str
    fanout: int
    bytes_per_s: float
    """Nominal, as the cluster that was measured had it."""

    topology: str
    figures: tuple[Fitted, ...]
    latency_s: float
    call_s: float
    efficiency: float
    efficiency_of: Mapping[str, float]
    host_bytes_per_s: float


@dataclass(frozen=True)
class Calibration:
    """A calibration file's content."""

    machine: Machine
    device: DeviceSpec | None
    """The device with measured constants; none where only collectives were imported."""

    device_figures: tuple[Fitted, ...] = ()
    levels: tuple[LevelFigures, ...] = ()
    samples: tuple[Mapping[str, Any], ...] = ()
    """What was timed, so that the fit can be done again."""

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(document(self), indent=1) + "\n"


def level_figures(level: Level, found: Sequence[Fitted]) -> LevelFigures:
    """Return the constants of a fitted level."""
    return LevelFigures(
        name=level.name,
        fanout=level.fanout,
        bytes_per_s=level.bytes_per_s,
        topology=level.topology,
        figures=tuple(found),
        latency_s=level.latency_s,
        call_s=level.call_s,
        efficiency=level.efficiency,
        efficiency_of=level.efficiency_of,
        host_bytes_per_s=level.host_bytes_per_s,
    )


def document(calibration: Calibration) -> dict[str, Any]:
    """Return the file's content as it is written."""
    from cost_models.device_file import device_document

    machine = calibration.machine
    made: dict[str, Any] = {
        "version": VERSION,
        "catalog_format": catalog.FORMAT,
        "machine": {key: getattr(machine, key) for key in (*_MACHINE_KEYS, *(_CORES_KEYS if machine.cores else ()))},
    }
    if calibration.device is not None:
        made["device"] = {**device_document(calibration.device), "catalog": machine.catalog}
        made["device_figures"] = [_figure_document(each, machine) for each in calibration.device_figures]
    made["levels"] = [
        {
            "name": each.name,
            "fanout": each.fanout,
            "bandwidth": units.exact_bandwidth(each.bytes_per_s),
            "topology": each.topology,
            "latency": units.exact_seconds(each.latency_s),
            "call_overhead": units.exact_seconds(each.call_s),
            "efficiency": each.efficiency,
            "efficiency_of": dict(each.efficiency_of),
            "host_bandwidth": units.exact_bandwidth(each.host_bytes_per_s),
            "figures": [_figure_document(figure, machine) for figure in each.figures],
        }
        for each in calibration.levels
    ]
    made["samples"] = [dict(each) for each in calibration.samples]
    return made


def _figure_document(each: Fitted, machine: Machine) -> dict[str, Any]:
    return {
        "figure": each.figure,
        "value": each.value,
        "unit": each.unit,
        "kind": "measured",
        "source": str(machine),
        "spread": round(each.spread, 4),
        "error": round(each.error, 4),
        "samples": each.samples,
    }


def read_calibration(path: Path) -> Calibration:
    """Return what a calibration file holds.

    Raises `ClusterError` where it cannot be read, or was written for another format of file or catalogue.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ClusterError(f"calibration file {str(path)!r} cannot be read: {reason}; {_REDO}") from None
    except RecursionError:
        raise ClusterError(f"calibration file {str(path)!r} nests thousands of lists or objects; {_REDO}") from None
    except json.JSONDecodeError as error:
        raise ClusterError(f"calibration file {str(path)!r} is no JSON: {error}; {_REDO}") from None
    top = Section.of(data, str(path))
    _check_formats(top)
    top.only("version", "catalog_format", "machine", "device", "device_figures", "levels", "samples")
    top.require("machine", "levels")
    return Calibration(
        machine=_machine(top.section("machine")),
        device=_device(top) if "device" in top else None,
        levels=tuple(_level(each) for each in top.sections("levels")),
        samples=tuple(each.data for each in top.sections("samples")),
    )


_REDO = "make it with `autopar calibrate -c CLUSTER -o FILE`, or leave `calibration` out of the cluster file"


def _check_formats(top: Section) -> None:
    for key, known, of in (("version", VERSION, "calibration file"), ("catalog_format", catalog.FORMAT, "catalogue")):
        found = top.data.get(key)
        if found == known and not isinstance(found, bool):
            continue
        age = "older" if isinstance(found, int) and not isinstance(found, bool) and found < known else "another format"
        than = f"older than the {of}'s format" if age == "older" else f"not of the {of}'s format"
        changed = "".join(f"; new since then: {catalog.FORMATS[n]}" for n in _between(found, known, key))
        raise top.error(f"is {found!r}, {than}, which is {known}{changed}; {_REDO}", key)


def _between(found: object, known: int, key: str) -> list[int]:
    if key != "catalog_format" or not isinstance(found, int) or isinstance(found, bool):
        return []
    return [n for n in range(found + 1, known + 1) if n in catalog.FORMATS]


def _machine(section: Section) -> Machine:
    section.only(*_MACHINE_KEYS, *_CORES_KEYS).require(
        "hardware", "kind", "catalog", "library", "nodes", "devices_per_node", "date"
    )
    return Machine(
        hardware=section.text("hardware"),
        kind=section.choice("kind", ("cpu", "gpu"), ""),
        catalog=section.text("catalog"),
        library=section.text("library"),
        nodes=section.count("nodes"),
        devices_per_node=section.count("devices_per_node"),
        date=section.text("date"),
        torch=section.text("torch"),
        cores=section.number("cores", 0.0),
        nodes_per_machine=section.count("nodes_per_machine") if "nodes_per_machine" in section else 1,
    )


def _device(top: Section) -> DeviceSpec:
    from cost_models.device_file import read_device

    return read_device("calibrated", top.section("device"))


def _level(section: Section) -> LevelFigures:
    keys = ("latency", "call_overhead", "host_bandwidth", "efficiency", "efficiency_of", "figures")
    section.only("name", "fanout", "bandwidth", "topology", *keys)
    section.require("name", "fanout", "bandwidth", "topology", "latency", "call_overhead", "efficiency")
    own = section.section("efficiency_of").only(*OPS)
    return LevelFigures(
        name=section.text("name"),
        fanout=section.count("fanout"),
        bytes_per_s=section.positive("bandwidth", units.parse_bandwidth),
        topology=section.text("topology"),
        figures=(),
        latency_s=section.required_quantity("latency", units.parse_time),
        call_s=section.required_quantity("call_overhead", units.parse_time),
        efficiency=section.share("efficiency", 1.0),
        efficiency_of={op: own.share(op, 1.0) for op in own.data},
        host_bytes_per_s=section.quantity("host_bandwidth", units.parse_bandwidth, 0.0),
    )


def calibrated_groups(
    calibration: Calibration, groups: Sequence[NodeGroup], network: Sequence[NetworkLevel], origin: str
) -> tuple[tuple[NodeGroup, ...], tuple[NetworkLevel, ...]]:
    """Return groups and network of a cluster with the calibration's constants in the place of the catalogue's.

    Levels that were not measured keep their figures. Raises `ClusterError` naming all that differs where the file is of
    another machine; `origin` names the file.
    """
    fitting = [group for group in groups if not _device_differs(calibration.machine, group.node.device)]
    if not fitting:
        differs = _device_differs(calibration.machine, groups[0].node.device)
        raise _of_another_machine(origin, calibration.machine, differs)
    by_name = {each.name: each for each in calibration.levels}
    names = ["node", *(each.name for each in network or (NetworkLevel("rack"),))]
    differs = [f"it has level {name!r}, the cluster {', '.join(names)}" for name in by_name if name not in names]
    for group in fitting:
        differs += _links_differ(by_name, group.node, names)
    if differs:
        raise _of_another_machine(origin, calibration.machine, list(dict.fromkeys(differs)))
    inside, first = by_name.get("node"), by_name.get(names[1])
    made = tuple(
        _with_cores(
            replace(group, node=_calibrated_node(group.node, _measured(calibration), inside, first)), calibration
        )
        if group in fitting
        else group
        for group in groups
    )
    return made, tuple(_calibrated_network(each, by_name, i) for i, each in enumerate(network))


def _device_differs(machine: Machine, device: DeviceSpec) -> list[str]:
    differs = []
    if machine.kind != device.kind:
        differs.append(f"its device is a {machine.kind}, the cluster's {device.name!r} a {device.kind}")
    elif machine.catalog != (device.catalog or device.name):
        differs.append(
            f"its device is {machine.catalog!r} ({machine.hardware}), the cluster's {device.catalog or device.name!r}"
        )
    return differs


def _links_differ(by_name: Mapping[str, LevelFigures], node: NodeSpec, names: Sequence[str]) -> list[str]:
    differs = []
    for name, link in (("node", node.links), (names[1], node.nic)):
        level = by_name.get(name)
        if level is None:
            continue
        if link is None:
            differs.append(f"it has level {name!r}, which joins nothing in node {node.name!r}")
            continue
        if abs(level.bytes_per_s / link.bytes_per_s - 1) > _SAME:
            mine, its = units.format_rate(level.bytes_per_s), units.format_rate(link.bytes_per_s)
            differs.append(f"its level {name!r} has {mine}, the cluster's {its}")
        if name == "node" and level.topology != link.topology:
            differs.append(f"its level {name!r} is a {level.topology}, the cluster's a {link.topology}")
    return differs


def _measured(calibration: Calibration) -> DeviceSpec | None:
    """Return the device that was measured; where attention was, no other library's figure stands beside it."""
    timed = any(each.get("kernel") == "attention" for each in calibration.samples)
    if calibration.device is None or not timed:
        return calibration.device
    return replace(calibration.device, vendor_attention_efficiency=0.0)


def _calibrated_node(
    node: NodeSpec, device: DeviceSpec | None, inside: LevelFigures | None, outside: LevelFigures | None
) -> NodeSpec:
    measured = node.device if device is None else replace(
        device,
        name=node.device.name,
        memory_bytes=node.device.memory_bytes,
        reserved_bytes=node.device.reserved_bytes,
        catalog="",
    )  # fmt: skip
    return replace(
        node,
        device=measured,
        links=_calibrated_link(node.links, inside),
        nic=_calibrated_link(node.nic, outside),
    )


def _with_cores(group: NodeGroup, calibration: Calibration) -> NodeGroup:
    """Return a group with the cores that were measured, if as many devices as a machine has shared them.

    What fewer devices do at once says nothing of more: the cluster's own figure stays. Where nobody measured cores, the
    device's figures hold what sharing them costs.
    """
    machine = calibration.machine
    if calibration.device is None:
        return group
    made = replace(group, node=replace(group.node, cores=machine.cores, nodes_per_machine=machine.nodes_per_machine))
    return group if machine.cores and made.machine_devices > machine.machine_devices else made


def _calibrated_link(link: LinkSpec | None, level: LevelFigures | None) -> LinkSpec | None:
    if link is None or level is None:
        return link
    return replace(
        link,
        latency_s=level.latency_s,
        call_overhead_s=level.call_s,
        efficiency=level.efficiency,
        efficiency_of=level.efficiency_of,
        host_bytes_per_s=level.host_bytes_per_s,
        catalog="",
    )


def _calibrated_network(each: NetworkLevel, by_name: Mapping[str, LevelFigures], place: int) -> NetworkLevel:
    level = by_name.get(each.name)
    if level is None:
        return each
    # The adapter holds overhead and efficiency of the first level; a level of its own can have another latency only.
    return replace(each, latency_s=level.latency_s) if place or each.latency_s is not None else each


def _of_another_machine(origin: str, machine: Machine, differs: Sequence[str]) -> ClusterError:
    return ClusterError(
        f"{origin}: is a calibration of another machine ({machine}): {'; '.join(differs)};"
        " name the right file under `calibration`, or make one with `autopar calibrate -c CLUSTER -o FILE`"
    )
