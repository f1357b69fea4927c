"""The blocks of ranks that the ranks of a pipeline can be, and what devices and links each of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from autopar.api.unlike import named
from autopar.search.assignments import Kind, Order
from cost_models.cluster import ClusterSpec
from cost_models.weakest import same_node


@dataclass(frozen=True)
class Places:
    """A cluster in equal blocks of neighbouring ranks, one for each rank of a pipeline."""

    cluster: ClusterSpec
    depth: int
    budget_of: Callable[[ClusterSpec], int]
    """The bytes that a device of a cluster may hold."""

    dtype: str
    """What most is computed in: tells fast devices from slow ones."""

    @cached_property
    def _found(self) -> tuple[tuple[ClusterSpec, ...], tuple[int, ...]]:
        width = self.cluster.device_count // self.depth
        clusters: list[ClusterSpec] = []
        kind_of = []
        for block in range(self.depth):
            found = self.cluster.as_equal(range(block * width, (block + 1) * width))
            node = found.groups[0].node
            known = (at for at, each in enumerate(clusters) if same_node(each.groups[0].node, node))
            kind = next(known, len(clusters))
            if kind == len(clusters):
                clusters.append(found)
            kind_of.append(kind)
        return tuple(clusters), tuple(kind_of)

    @property
    def clusters(self) -> tuple[ClusterSpec, ...]:
        """Return, of each kind of block, the cluster as if all nodes were as slow as the slowest of such a block."""
        return self._found[0]

    @property
    def kind_of(self) -> tuple[int, ...]:
        """Return the kind of each block, in the order of ranks."""
        return self._found[1]

    @property
    def given(self) -> Order:
        """Return the blocks in the order of their ranks."""
        return tuple(range(self.depth))

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """Return the bytes that a device of each block may hold."""
        of_kind = [self.budget_of(each) for each in self.clusters]
        return tuple(of_kind[kind] for kind in self.kind_of)

    @cached_property
    def reserved(self) -> tuple[int, ...]:
        """Return what of these the devices take for themselves."""
        return tuple(int(self.clusters[kind].device.reserved_bytes) for kind in self.kind_of)

    @cached_property
    def pace(self) -> float:
        """Return how many blocks of the slowest devices compute as much as all blocks: `depth` where all are equal."""
        return sum(self.speed(kind) for kind in self.kind_of) if len(self.clusters) > 1 else float(self.depth)

    def speed(self, kind: int) -> float:
        """Return how fast a kind's devices compute large products, over the slowest of the cluster."""
        rates = (
            each.peak_flops.get(self.dtype, 0.0) * each.matmul_efficiency_for(self.dtype)
            for each in (self.clusters[kind].device, self.cluster.as_equal().device)
        )
        own, least = rates
        return own / least if least else 1.0

    def kinds(self, held_bytes: int) -> list[Kind]:
        """Return what tells the kinds apart, where `held_bytes` of each device's memory are taken."""
        free = {kind: self.budgets[at] - self.reserved[at] - held_bytes for at, kind in enumerate(self.kind_of)}
        return [Kind(self.speed(kind), free[kind]) for kind in range(len(self.clusters))]

    def devices(self, block: int) -> str:
        """Return the devices of a block as people read them: `8 x h100`."""
        width = self.cluster.device_count // self.depth
        return named(self.cluster.devices[block * width : (block + 1) * width])

    def joining(self, blocks: Iterable[int]) -> ClusterSpec:
        """Return the cluster as slow as the slowest of some blocks: what they send one another has that pace."""
        first, *others = (self.clusters[self.kind_of[block]] for block in blocks)
        for each in others:
            first = first.slower_of(each)
        return first
