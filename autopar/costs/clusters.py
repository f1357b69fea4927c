"""Operators whose strategy follows from that of the one operator they read.

A view, a cast to a smaller type or an elementwise function of one tensor takes
its layout from its input. Deciding it apart would gain nothing: redistributing
before or after it moves the same bytes. Such followers join their producer's
cluster; the search decides clusters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Op
from autopar.ir.strategy import MeshStrategy


@dataclass
class Cluster:
    """Operators decided together; option `k` gives each member one strategy."""

    members: list[str]
    options: list[tuple[MeshStrategy, ...]]
    """[option][member]"""

    index: dict[str, int] = field(default_factory=dict)
    """Place of each member."""

    once: list[bool] = field(default_factory=list)
    """For a parameter: whether option `k` keeps the copy gathered in forward for backward."""

    def strategy(self, member: str, option: int) -> MeshStrategy:
        """Return the strategy of a member under an option."""
        return self.options[option][self.index[member]]


def build(graph: Graph, choices: Mapping[str, Sequence[MeshStrategy]]) -> tuple[list[Cluster], dict[str, int]]:
    """Return the clusters, and for each representative operator the place of its cluster."""
    producers = _single_producers(graph)
    clusters: list[Cluster] = []
    home: dict[str, int] = {}
    for op in graph.ops:
        if graph.representative(op.name) != op.name:
            continue
        leader = producers.get(op.name)
        joined = leader is not None and leader in home and _join(graph, clusters[home[leader]], op, leader, choices)
        if joined and leader is not None:
            home[op.name] = home[leader]
            continue
        home[op.name] = len(clusters)
        clusters.append(Cluster([op.name], [(s,) for s in choices[op.name]], {op.name: 0}))
    return clusters, home


def _single_producers(graph: Graph) -> dict[str, str]:
    """Return, for each representative operator, the one representative that all its instances read, if they do."""
    read: dict[str, set[str]] = {}
    count: dict[str, int] = {}
    for op in graph.ops:
        rep = graph.representative(op.name)
        count[rep] = count.get(rep, 0) + 1
        if op.kind == "call":
            read.setdefault(rep, set()).update(graph.representative(ref.op) for ref in op.refs)
    single = {rep: next(iter(found)) for rep, found in read.items() if len(found) == 1}
    return {rep: leader for rep, leader in single.items() if count[rep] == count[leader] and rep != leader}


def _join(graph: Graph, cluster: Cluster, op: Op, leader: str, choices: Mapping[str, Sequence[MeshStrategy]]) -> bool:
    """Add `op` to its producer's cluster if it follows under every option; return whether it did."""
    metas = [graph.meta(ref) for ref in op.refs]
    made = [meta for meta in op.outputs if meta is not None]
    moved_later = sum(meta.nbytes for meta in made)
    if len(made) != 1 or moved_later > metas[0].nbytes or graph.by_name[leader].kind == "tangent":
        return False
    by_need: dict[object, list[MeshStrategy]] = {}
    for strategy in choices[op.name]:
        by_need.setdefault(strategy.inputs, []).append(strategy)
    follows = []
    for option in range(len(cluster.options)):
        outputs = cluster.strategy(leader, option).outputs
        need = tuple(outputs[ref.index] for ref in op.refs)
        fitting = by_need.get(need, [])
        if len(fitting) != 1:
            return False
        follows.append(fitting[0])
    cluster.index[op.name] = len(cluster.members)
    cluster.members.append(op.name)
    cluster.options = [(*done, new) for done, new in zip(cluster.options, follows, strict=True)]
    return True
