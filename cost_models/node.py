"""Parts of a cluster: links inside a node, adapters, nodes, groups, network levels."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cost_models import catalog
from cost_models.device import DeviceSpec
from cost_models.library import Library, nccl

TOPOLOGIES = ("switch", "mesh", "cube-mesh", "ring", "pcie", "host", "fat-tree", "torus", "dragonfly")
"""How the endpoints of a level are joined.

`mesh`: every endpoint has a direct link to every other, so that a group of g
out of f endpoints has (g - 1) / (f - 1) of the bandwidth. `cube-mesh`: eight
endpoints of six links each, see `cost_models.topology`. `host`: loopback. All
others give every endpoint its full bandwidth towards its level.
"""


@dataclass(frozen=True)
class LinkSpec:
    """Links that join the devices of one node, or the adapters of a node."""

    bytes_per_s: float
    """Nominal, per endpoint (device or node) and direction."""

    latency_s: float
    """One message from rank to rank."""

    topology: str = "switch"
    efficiency: float = 1.0
    """Fraction of the nominal bandwidth that collectives reach at large sizes."""

    call_overhead_s: float = 0.0
    """Host and launch share of one collective call."""

    in_switch_reduction: bool = False
    host_bytes_per_s: float = 0.0
    """What a CPU core that computes at the same time handles of what it sends: copies to and from sockets, sums.
    0: not known, `overlap.EFFICIENCY` holds."""

    efficiency_of: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Of collectives that reach another fraction than `efficiency`."""

    catalog: str = field(default="", compare=False)
    """Catalogue entry that the figures come from; empty if described by the user."""


@dataclass(frozen=True)
class NodeSpec:
    """One machine: equal devices, the links between them, its network adapters."""

    name: str
    device: DeviceSpec
    count: int
    links: LinkSpec | None = None
    nic: LinkSpec | None = None
    cores: float = 0.0
    """How many devices' worth of work the machine does at once, where its devices are ranks that share its cores.
    0: each device computes for itself."""

    nodes_per_machine: int = 1
    """Nodes that are one machine and share its cores, as network namespaces or containers do."""


@dataclass(frozen=True)
class NodeGroup:
    """A run of equal nodes in rank order."""

    node: NodeSpec
    count: int

    @property
    def machine_devices(self) -> int:
        """Return the devices of one machine."""
        return self.node.count * min(self.node.nodes_per_machine, self.count)

    @property
    def share(self) -> float:
        """Return what a device has of a core while all devices of its machine compute; 1 where none are shared."""
        return min(1.0, self.node.cores / self.machine_devices) if self.node.cores else 1.0


@dataclass(frozen=True)
class NetworkLevel:
    """One level of switches outside the node."""

    name: str
    topology: str = "fat-tree"
    oversubscription: float = 1.0
    """Adapter bandwidth entering an endpoint of this level over what leaves it."""

    latency_s: float | None = None
    """End to end through this level; None: that of the adapter."""

    size: int | None = None
    """Endpoints joined (nodes, or groups of the level below); None: all that remain."""

    bytes_per_s: float | None = None
    """Per endpoint and direction; None: the sum of adapters below / oversubscription."""


@dataclass(frozen=True)
class Level:
    """One level of the hierarchy that joins `fanout` endpoints of the level below."""

    name: str
    fanout: int
    bytes_per_s: float
    """Nominal, per endpoint of this level and direction."""

    latency_s: float
    topology: str
    in_switch_reduction: bool
    efficiency: float = 1.0
    call_s: float = 0.0
    library: Library = field(default_factory=nccl)
    host_bytes_per_s: float = 0.0
    efficiency_of: Mapping[str, float] = field(default_factory=dict, hash=False)


def catalogued_link(section: str, name: str) -> LinkSpec:
    """Return the entry `name` of section `links` or `nics` of the catalogue."""
    entry = catalog.entry(section, name)
    inside = section == "links"
    return LinkSpec(
        bytes_per_s=catalog.number(entry, "bandwidth"),
        latency_s=catalog.number(entry, "latency"),
        topology=catalog.text(entry, "topology") if inside else "fat-tree",
        efficiency=catalog.number(entry, "efficiency"),
        call_overhead_s=catalog.number(entry, "call_overhead"),
        in_switch_reduction=inside and bool(catalog.figure(entry, "in_switch_reduction").value),
        host_bytes_per_s=catalog.number(entry, "host_bandwidth", 0.0),
        catalog=name,
    )
