"""How the ranks of one mesh axis lie on the link levels of a cluster.

Ranks are laid row-major: the last mesh axis joins adjacent ranks, and ranks
fill a node before the next one begins. On 8 nodes x 8 devices:

    mesh (8, 8), axis 1:  hops (8 ranks, node)              whole links
    mesh (8, 8), axis 0:  hops (8 ranks, rack)              adapters / 8: eight groups leave every node at once
    mesh (4, 16), axis 1: hops (8 ranks, node), (2, rack)   whole adapters: one group a node
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cost_models.errors import ClusterError
from cost_models.library import Library, nccl
from cost_models.node import Level


@dataclass(frozen=True)
class Hop:
    """One level crossed by a group, inner to outer."""

    ranks: int
    """Parts of the group that meet on this level."""

    bytes_per_s: float
    """Nominal bandwidth that ONE group has here, per endpoint of the level and direction,
    while all groups of the axis communicate: the level's, shared by the groups of an endpoint."""

    latency_s: float
    level: str
    in_switch_reduction: bool = False
    efficiency: float = 1.0
    """Fraction of `bytes_per_s` that the library reaches at large sizes."""

    call_s: float = 0.0
    """Host and launch share of one call."""

    library: Library = field(default_factory=nccl)
    """What runs the collectives; the same on all levels of a cluster."""

    host_bytes_per_s: float = 0.0
    """What a computing CPU core handles of what it sends; 0: not known."""

    efficiency_of: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Of collectives that reach another fraction than `efficiency`."""

    def serving(self, op: str) -> "Hop":
        """Return the hop as collective `op` finds it."""
        return replace(self, efficiency=self.efficiency_of.get(op, self.efficiency)) if self.efficiency_of else self

    @property
    def achieved_bytes_per_s(self) -> float:
        """Return the bandwidth that a large transfer reaches."""
        return self.bytes_per_s * self.efficiency


def axis_hops(levels: Sequence[Level], axis_sizes: tuple[int, ...], axis: int) -> tuple[Hop, ...]:
    """Return the levels that the groups of `axis` cross, inner to outer.

    The product of the hops' ranks is the size of the axis; an axis of size 1
    crosses nothing. Not modelled: an adapter that belongs to one device and
    cannot serve its neighbours, and traffic of other axes at the same time.

    Raises `ClusterError` where the mesh exceeds the cluster or an axis does
    not divide a level evenly.
    """
    size = axis_sizes[axis]
    if size == 1:
        return ()
    stride = math.prod(axis_sizes[axis:][1:]) if axis >= 0 else math.prod(axis_sizes[len(axis_sizes) + axis + 1 :])
    _check(levels, axis_sizes, stride, size)
    hops = []
    inside = 1  # devices of one endpoint of the level
    of_group = 1  # ranks of one group among them
    for level in levels:
        outside = inside * level.fanout
        first, last = max(stride, inside), min(stride * size, outside)
        if last > first:
            ranks = last // first
            hops.append(_hop(level, ranks, first // inside, groups_in_endpoint=inside // of_group))
            of_group *= ranks
        inside = outside
    return tuple(hops)


_CUBE_LINKS: Mapping[tuple[int, int], int] = {(2, 1): 1, (2, 2): 1, (2, 4): 2, (4, 1): 4, (4, 2): 2, (8, 1): 6}
"""Of a hybrid cube mesh, links of a device that rings use: of so many ranks, so far apart.

DGX-1 and cloud machines of eight V100: `nvidia-smi topo -m` in https://github.com/Oneflow-Inc/DLPerf
(OneFlow/LanguageModeling/GPT/README.md, read 2026-11-23). Devices 0 and 1 share one link of six, 0 and 4 two; 0 to 3
have two rings of single links, both ways, among themselves; 0, 2, 6 and 4 one.
"""


def links_share(topology: str, ranks: int, of: int, apart: int = 1) -> float:
    """Return the share of their links that `ranks` out of `of` endpoints, `apart` from each other, can use.

    1 where a switch joins them, and where nothing is known of the shape.
    """
    if topology == "mesh" and of > 1:
        return (ranks - 1) / (of - 1)
    if topology == "cube-mesh" and (ranks, apart) in _CUBE_LINKS and (of, 1) in _CUBE_LINKS:
        return min(1.0, _CUBE_LINKS[ranks, apart] / _CUBE_LINKS[of, 1])
    return 1.0


def _hop(level: Level, ranks: int, apart: int, groups_in_endpoint: int) -> Hop:
    direct_links = links_share(level.topology, ranks, level.fanout, apart)
    return Hop(
        ranks=ranks,
        bytes_per_s=level.bytes_per_s * direct_links / groups_in_endpoint,
        latency_s=level.latency_s,
        level=level.name,
        in_switch_reduction=level.in_switch_reduction,
        efficiency=level.efficiency,
        call_s=level.call_s,
        library=level.library,
        host_bytes_per_s=level.host_bytes_per_s,
        efficiency_of=level.efficiency_of,
    )


def _check(levels: Sequence[Level], axis_sizes: tuple[int, ...], stride: int, size: int) -> None:
    if any(each < 1 for each in axis_sizes):
        message = f"mesh {axis_sizes} has an axis of fewer than 1 rank"
        raise ClusterError(message)
    devices = math.prod(level.fanout for level in levels)
    if math.prod(axis_sizes) > devices:
        message = f"mesh {axis_sizes} needs {math.prod(axis_sizes)} devices and the cluster has {devices}"
        raise ClusterError(message)
    extent = 1
    for level in levels:
        extent = min(extent * level.fanout, math.prod(axis_sizes))  # what the mesh leaves idle need not divide
        for edge in (stride, stride * size):
            if max(edge, extent) % min(edge, extent):
                raise _uneven(level, extent, axis_sizes, stride, size)


def _uneven(level: Level, extent: int, axis_sizes: tuple[int, ...], stride: int, size: int) -> ClusterError:
    return ClusterError(
        f"mesh {axis_sizes}: an axis of {size} ranks, {stride} apart, spans {stride * size} ranks, which does not"
        f" divide evenly into level {level.name!r} of {extent} devices; choose axis sizes whose products"
        f" divide {extent} or are multiples of it"
    )
