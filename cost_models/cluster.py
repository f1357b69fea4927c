"""The described cluster: which devices, in which nodes, joined by which levels."""

import hashlib
import json
import logging
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from cost_models import catalog
from cost_models.cluster_file import Parts, parts_document, preset_node, read_parts, shorthand_node
from cost_models.device import DeviceSpec
from cost_models.errors import ClusterError, suggestion
from cost_models.library import Library, library_of
from cost_models.node import Level, LinkSpec, NetworkLevel, NodeGroup, NodeSpec
from cost_models.section import LARGEST_COUNT
from cost_models.weakest import same_figures, same_node, weakest_link, weakest_node

__all__ = ["ClusterSpec", "DeviceSpec", "Level", "LinkSpec", "NetworkLevel", "NodeGroup", "NodeSpec"]

_SHORTHAND = re.compile(r"(?P<device>[^:/\s]+):(?P<per_node>[^x:/]*)(x(?P<nodes>[^x:/]*))?")
_LOG = logging.getLogger("cost_models")
_FILE_ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class ClusterSpec:
    """Groups of nodes in rank order, and the network between the nodes."""

    name: str
    groups: tuple[NodeGroup, ...]
    network: tuple[NetworkLevel, ...] = ()
    calibration: str = ""
    """Path of a calibration file that is named and not applied; empty: none."""

    calibrated: str = ""
    """Which calibration file the figures come from, and what was measured for it; empty: none."""

    def __post_init__(self) -> None:
        """Refuse a cluster whose network does not join its nodes."""
        if self.node_count > 1:
            self._check_adapters()
            self._network_sizes()

    @classmethod
    def parse(cls, text_or_path: str | Path) -> Self:
        """Return the cluster that a YAML path, preset or shorthand stands for.

        `dgx-h100` is one node of that preset, `dgx-h100x4` four; `cpu:4` is one node of four
        devices and `h100-sxm-80gb:8x4` four nodes of eight.

        Raises `ClusterError` with the ways to write a cluster.
        """
        text = str(text_or_path)
        if text in catalog.names("nodes"):
            return cls(text, (NodeGroup(preset_node(text), 1),))
        if isinstance(text_or_path, Path) or text.endswith(_FILE_ENDINGS) or _is_file(text):
            return cls.from_file(text)
        preset, _, nodes = text.rpartition("x")
        if preset in catalog.names("nodes"):
            return cls(text, (NodeGroup(preset_node(preset), _count(nodes, text, "nodes")),))
        matched = _SHORTHAND.fullmatch(text)
        if matched is None:
            raise _not_a_cluster(text)
        if matched["device"] in catalog.names("nodes"):
            nodes = "x".join((matched["device"], matched["nodes"] or matched["per_node"] or "4"))
            raise ClusterError(
                f"{text!r} takes the node preset {matched['device']!r} for a device; {nodes} is so many of these nodes,"
                " and DEVICE:COUNTxNODES such as h100-sxm-80gb:8x4 is nodes of so many devices"
            )
        per_node = _count(matched["per_node"], text, "devices per node")
        count = 1 if matched["nodes"] is None else _count(matched["nodes"], text, "nodes")
        return cls(text, (NodeGroup(shorthand_node(matched["device"], per_node), count),))

    @classmethod
    def from_file(cls, path: str | Path, *, calibrate: bool = True) -> Self:
        """Return the cluster of a YAML (or JSON) file, with the figures of the calibration file that it names.

        A calibration file that does not exist is warned of: a cluster file may name it before it is made. Raises
        `ClusterError` where it is of another machine or format. Without `calibrate`, it is not looked at.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            message = f"cluster file {str(path)!r} cannot be read: {reason}; {_ways()}"
            raise ClusterError(message) from None
        found = cls.from_dict(_load_yaml(text, str(path)), origin=str(path))
        return found._with_calibration(Path(path)) if calibrate and found.calibration else found

    @classmethod
    def from_dict(cls, document: object, origin: str = "cluster") -> Self:
        """Return the cluster of a document in the cluster file's format."""
        parts = read_parts(document, origin)
        try:
            return cls(parts.name, parts.groups, parts.network, parts.calibration, parts.calibrated)
        except ClusterError as error:
            message = f"{origin}: {error}"
            raise ClusterError(message) from None

    @classmethod
    def detect(cls, cpu_ranks: int | None = None) -> Self:
        """Return this machine: its NVIDIA devices if nvidia-smi lists any, else its CPU cores.

        With `cpu_ranks` so many ranks on the CPU, whatever else there is; if there are fewer cores, they share them.
        """
        from cost_models.detect import detect_node

        return cls("this-machine", (NodeGroup(detect_node(cpu_ranks), 1),))

    def to_dict(self) -> dict[str, Any]:
        """Return the cluster file that `from_dict` reads back as an equal cluster."""
        return parts_document(Parts(self.name, self.groups, self.network, self.calibration, self.calibrated))

    def fingerprint(self) -> str:
        """Return the sha256 of the resolved cluster, as hexadecimal digits."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def device_count(self) -> int:
        """Return the number of devices of all groups."""
        return sum(group.node.count * group.count for group in self.groups)

    @property
    def node_count(self) -> int:
        """Return the number of nodes of all groups."""
        return sum(group.count for group in self.groups)

    @property
    def devices_per_node(self) -> int:
        """Return the devices of every node; an error where nodes differ."""
        counts = {group.node.count for group in self.groups}
        if len(counts) > 1:
            raise self._mixed("devices per node")
        return counts.pop()

    @property
    def is_homogeneous(self) -> bool:
        """Return whether all nodes have equal devices, links and adapters."""
        first = self.groups[0].node
        return all(same_node(first, group.node) for group in self.groups)

    @property
    def device(self) -> DeviceSpec:
        """Return the device that all nodes have, as it is while all compute; an error naming groups where they differ.

        Devices that share cores are slower then than one that computes alone, see `alone`; unlike ones: `as_equal`.
        """
        first = self.groups[0].node.device
        if any(not same_figures(first, group.node.device) for group in self.groups):
            raise self._mixed("device")
        return first.at_share(self.share)

    @property
    def share(self) -> float:
        """Return what a device has of a core while all compute, the least of all groups; 1 where none are shared."""
        return self._tightest.share

    @property
    def shared_cores(self) -> tuple[float, int] | None:
        """Return the cores of a machine and the devices that share them, where some do; the scarcest of all groups."""
        group = self._tightest
        return (group.node.cores, group.machine_devices) if group.share < 1.0 else None

    @property
    def alone(self) -> "ClusterSpec":
        """Return the cluster as a device finds it that computes while no other one does: no cores are shared."""
        groups = (replace(g, node=replace(g.node, cores=0.0, nodes_per_machine=1)) for g in self.groups)
        return replace(self, groups=tuple(groups))

    @property
    def memory_bytes(self) -> int:
        """Return the memory of the smallest device."""
        return min(group.node.device.memory_bytes for group in self.groups)

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the link levels, inner to outer, as they are while all compute; of unlike nodes, the slowest counts.

        An error where nodes have unlike numbers of devices: such a cluster has
        no common hierarchy; see `in_equal_nodes`.
        """
        node_level = _node_level([group.node for group in self.groups], self.devices_per_node)
        network = self._network_levels() if self.node_count > 1 else ()
        return tuple(_at_share(level, self.share) for level in (node_level, *network))

    def split_groups(self) -> tuple["ClusterSpec", ...]:
        """Return one homogeneous cluster a group, in rank order, without outer network sizes."""
        network = tuple(
            NetworkLevel(each.name, each.topology, each.oversubscription, each.latency_s) for each in self.network[:1]
        )
        return tuple(
            ClusterSpec(f"{self.name}/{group.node.name}", (group,), network, self.calibration, self.calibrated)
            for group in self.groups
        )

    def as_equal(self, ranks: range | None = None) -> "ClusterSpec":
        """Return the cluster as if all its nodes were as slow as the slowest of those with `ranks`; None: all.

        Of each figure the worst counts, see `weakest`: ranks of equal shards wait for one another. The levels stay
        where they are, so that a mesh lies on them as on the cluster itself. A cluster of equal nodes is returned as
        it is; of nodes with unlike numbers of devices, see `in_equal_nodes`.
        """
        if self.is_homogeneous:
            return self
        cut = self.in_equal_nodes()
        per_node = cut.devices_per_node
        nodes = [group.node for group in cut.groups for _ in range(group.count)]
        if ranks is not None:
            nodes = nodes[ranks.start // per_node : -(-ranks.stop // per_node)]
        return replace(cut, groups=(NodeGroup(weakest_node(nodes), cut.node_count),))

    def in_equal_nodes(self) -> "ClusterSpec":
        """Return the cluster with nodes cut into parts that all have equally many devices, where nodes do not.

        Parts of a node share its adapter, and what they send one another is taken to go through it, over one network
        level that is as slow as the slowest there is: slower than it is, since links inside a node are faster.
        """
        size = math.gcd(*(group.node.count for group in self.groups))
        if all(group.node.count == size for group in self.groups):
            return self
        slowest = weakest_link([group.node.nic for group in self.groups if group.node.nic is not None])
        if slowest is None:
            raise self._mixed("devices per node")
        inside, worst = 1, 0.0
        for level in self._network_levels():
            worst = max(worst, slowest.bytes_per_s * inside / level.bytes_per_s)
            inside *= level.fanout
        described = self.network or (NetworkLevel("rack"),)
        latencies = [each.latency_s for each in described if each.latency_s is not None]
        joined = NetworkLevel(described[-1].name, described[-1].topology, worst, max(latencies, default=None))
        return replace(self, groups=tuple(_in_parts(group, size) for group in self.groups), network=(joined,))

    def slower_of(self, other: "ClusterSpec") -> "ClusterSpec":
        """Return a cluster of equal nodes as if they were as slow as its own and another's."""
        node, beside = self.groups[0].node, other.groups[0].node
        if same_node(node, beside):
            return self
        return replace(self, groups=(NodeGroup(weakest_node([node, beside]), self.node_count),))

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """Return the device of every rank."""
        return tuple(group.node.device for group in self.groups for _ in range(group.count * group.node.count))

    @property
    def _tightest(self) -> NodeGroup:
        return min(self.groups, key=lambda group: group.share)

    def _with_calibration(self, path: Path) -> Self:
        """Return the cluster with measured constants; `path` is the cluster file."""
        from cost_models.calibration import calibrated_groups, read_calibration

        place = path.parent / self.calibration
        if not place.exists():
            _LOG.warning(
                "%s: the calibration file %r does not exist, so figures are the catalogue's;"
                " make it with `autopar calibrate -c %s -o %s`",
                *(path, str(place), path, place),
            )
            return self
        found = read_calibration(place)
        groups, network = calibrated_groups(found, self.groups, self.network, str(place))
        told = f"{self.calibration}: {found.machine}"
        return replace(self, groups=groups, network=network, calibration="", calibrated=told)

    def _network_levels(self) -> tuple[Level, ...]:
        slowest = weakest_link([group.node.nic for group in self.groups if group.node.nic is not None])
        if slowest is None:
            return ()
        library = _library([group.node for group in self.groups])
        described = self.network or (NetworkLevel("rack"),)
        levels = []
        nodes_inside = 1
        for each, fanout in zip(described, self._network_sizes(), strict=True):
            adapters = slowest.bytes_per_s * nodes_inside / each.oversubscription
            levels.append(
                Level(
                    name=each.name,
                    fanout=fanout,
                    bytes_per_s=adapters if each.bytes_per_s is None else each.bytes_per_s,
                    latency_s=slowest.latency_s if each.latency_s is None else each.latency_s,
                    topology=each.topology,
                    in_switch_reduction=False,
                    efficiency=slowest.efficiency,
                    call_s=slowest.call_overhead_s,
                    library=library,
                    host_bytes_per_s=slowest.host_bytes_per_s,
                    efficiency_of=slowest.efficiency_of,
                )
            )
            nodes_inside *= fanout
        return tuple(levels)

    def _network_sizes(self) -> tuple[int, ...]:
        """Return the fanout of every network level; an error where they do not make up the nodes."""
        described = self.network or (NetworkLevel("rack"),)
        sizes = [each.size for each in described]
        for each in described[:-1]:
            if each.size is None:
                message = f"network level {each.name!r} is not the outermost and needs 'size', the endpoints it joins"
                raise ClusterError(message)
        given = math.prod(size for size in sizes if size is not None)
        if sizes[-1] is None and self.node_count % given == 0:
            sizes[-1] = self.node_count // given
        found = tuple(size for size in sizes if size is not None)
        if math.prod(found) != self.node_count or len(found) != len(sizes):
            levels = " x ".join(f"{each.name} {each.size or '?'}" for each in described)
            message = f"network levels ({levels}) do not make up the {self.node_count} nodes of the groups"
            raise ClusterError(message)
        return found

    def _check_adapters(self) -> None:
        for group in self.groups:
            if group.node.nic is None:
                message = (
                    f"node {group.node.name!r} has no 'nic', but the cluster has {self.node_count} nodes;"
                    " add such as `nic: {bandwidth: 3200Gbit/s, latency: 5us}`"
                )
                raise ClusterError(message)

    def _mixed(self, what: str) -> ClusterError:
        groups = ", ".join(f"{g.count} x {g.node.name} ({g.node.count} x {g.node.device.name})" for g in self.groups)
        return ClusterError(
            f"cluster {self.name!r} mixes nodes and has no one {what}: {groups};"
            " ask one group at a time (split_groups), or all as if they were as slow as the slowest (as_equal)"
        )


def _in_parts(group: NodeGroup, size: int) -> NodeGroup:
    """Return a group whose nodes are cut into parts of `size` devices, each with its share of the adapter.

    Parts are of the machine that their node was of, and share its cores.
    """
    node = group.node
    parts = node.count // size
    nic = None if node.nic is None else replace(node.nic, bytes_per_s=node.nic.bytes_per_s / parts)
    machine = node.nodes_per_machine * parts
    return NodeGroup(replace(node, count=size, nic=nic, nodes_per_machine=machine), group.count * parts)


def _node_level(nodes: list[NodeSpec], fanout: int) -> Level:
    slowest = weakest_link([node.links for node in nodes if node.links is not None])
    if slowest is None:  # one device a node: nothing to join, the level is a copy in its memory
        memory_bytes_per_s = min(node.device.memory_bytes_per_s for node in nodes)
        return Level("node", fanout, memory_bytes_per_s, 0.0, "host", False, library=_library(nodes))
    return Level(
        name="node",
        fanout=fanout,
        bytes_per_s=slowest.bytes_per_s,
        latency_s=slowest.latency_s,
        topology=slowest.topology,
        in_switch_reduction=slowest.in_switch_reduction,
        efficiency=slowest.efficiency,
        call_s=slowest.call_overhead_s,
        library=_library(nodes),
        host_bytes_per_s=slowest.host_bytes_per_s,
        efficiency_of=slowest.efficiency_of,
    )


def _at_share(level: Level, share: float) -> Level:
    """Return a level as ranks have it with `share` of a core each: that part is slower which cores do."""
    if share == 1.0:
        return level
    level = replace(level, host_bytes_per_s=level.host_bytes_per_s * share)
    if level.topology != "host":
        return level
    return replace(
        level,
        bytes_per_s=level.bytes_per_s * share,
        latency_s=level.latency_s / share,
        call_s=level.call_s / share,
    )


def _library(nodes: list[NodeSpec]) -> Library:
    """Return the library of a group that spans the nodes; one CPU host among them makes all of them use gloo."""
    kinds = {node.device.kind for node in nodes}
    return library_of("cpu" if "cpu" in kinds else "gpu")


def _load_yaml(text: str, origin: str) -> object:
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _require_single_keys(root, origin)
        return yaml.safe_load(text)
    except RecursionError:
        message = f"{origin}: is no cluster file: it nests hundreds of lists or mappings"
        raise ClusterError(message) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: of a date, or a number with too many digits
        message = f"{origin}: is no YAML: {_told(error)}"
        raise ClusterError(message) from None


def _told(error: Exception) -> str:
    """Return what is wrong in a line: the parser's words, and where, counted from 1."""
    import yaml

    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        words = [each for each in (error.problem, error.context) if each]
        said = " ".join(reversed(words) if words[0].startswith("but ") else words)
        return f"{said}, in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def _require_single_keys(root: Any, origin: str) -> None:
    """Raise where a mapping has a key twice, of which YAML would take the last."""
    found: list[tuple[Any, str]] = [] if root is None else [(root, "")]
    seen: set[int] = set()
    while found:
        node, path = found.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.id == "mapping":
            lines: dict[str, int] = {}
            for key, value in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines and key.tag != "tag:yaml.org,2002:merge":
                    message = (
                        f"{origin}: {f'{path}.' if path else ''}{name}: given twice, in line {lines[name]} and in line "
                        f"{line}; keep one of them"
                    )
                    raise ClusterError(message)
                lines[name] = line
                found.append((value, f"{path}.{name}" if path else name))
        elif node.id == "sequence":
            found += [(value, f"{path}[{index}]") for index, value in enumerate(node.value)]


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # longer than names of files can be
        return False


def _count(text: str, whole: str, what: str) -> int:
    if not text.isascii() or not text.isdigit() or not text.strip("0"):
        message = f"cluster {whole!r}: the number of {what} must be a whole number of at least 1, but is {text!r}"
        raise ClusterError(message)
    if len(text) > len(str(LARGEST_COUNT)) or int(text) > LARGEST_COUNT:
        message = f"cluster {whole!r}: the number of {what} must be at most {LARGEST_COUNT:,}, but is {text}"
        raise ClusterError(message)
    return int(text)


def _not_a_cluster(text: str) -> ClusterError:
    known = (*catalog.names("nodes"), *(f"{each}:8" for each in catalog.names("devices")))
    return ClusterError(f"{text!r} is no cluster{suggestion(text, known)}; {_ways()}")


def _ways() -> str:
    presets = ", ".join(catalog.names("nodes"))
    return f"give a YAML file, a preset ({presets}), or DEVICE:PER_NODExNODES such as cpu:4 or h100-sxm-80gb:8x4"
