"""Operators whose strategy follows from that of the one operator they read.

A view, a cast to a smaller type or an elementwise function of one tensor takes
its layout from its input. Deciding it apart would gain nothing: redistributing
before or after it moves the same bytes. Such followers join their producer's
cluster; the search decides clusters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Op, once_per_graph
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

    early: list[bool] = field(default_factory=list)
    """For a parameter: whether option `k` brings each micro-batch's gradient to its place, not only their sum."""

    def strategy(self, member: str, option: int) -> MeshStrategy:
        """Return the strategy of a member under an option."""
        return self.options[option][self.index[member]]


def build(graph: Graph, choices: Mapping[str, Sequence[MeshStrategy]]) -> tuple[list[Cluster], dict[str, int]]:
    """Return the clusters, and for each representative operator the place of its cluster."""
    sources = _sources(graph)
    clusters: list[Cluster] = []
    home: dict[str, int] = {}
    for op in graph.ops:
        if graph.representative(op.name) != op.name:
            continue
        place = _leader(op, sources, clusters, home)
        if place is not None and _join(graph, clusters[place], op, place, home, choices[op.name]):
            home[op.name] = place
            continue
        home[op.name] = len(clusters)
        clusters.append(Cluster([op.name], [(s,) for s in choices[op.name]], {op.name: 0}))
    return clusters, home


@once_per_graph
def _sources(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return, for each representative operator, what each of its slots reads, if all its instances read the same.

    Absent where instances read different representatives (the first of a stack of layers reads
    the embedding), or the count of instances differs from that of what they read.
    """
    read: dict[str, list[set[str]]] = {}
    count: dict[str, int] = {}
    for op in graph.ops:
        rep = graph.representative(op.name)
        count[rep] = count.get(rep, 0) + 1
        slots = read.setdefault(rep, [set() for _ in op.refs])
        for slot, ref in zip(slots, op.refs, strict=True):
            slot.add(graph.representative(ref.op))
    found: dict[str, tuple[str, ...]] = {}
    for rep, slots in read.items():
        if slots and all(len(slot) == 1 for slot in slots):
            found[rep] = tuple(next(iter(slot)) for slot in slots)
    return {rep: names for rep, names in found.items() if all(count[n] in {1, count[rep]} for n in names)}


def _leader(
    op: Op, sources: Mapping[str, tuple[str, ...]], clusters: list[Cluster], home: dict[str, int]
) -> int | None:
    """Return the one cluster with a choice that the operator reads, or the one without if it reads no other."""
    names = sources.get(op.name, ()) if op.kind == "call" else ()
    if not names or any(name not in home for name in names):
        return None
    read = {home[name] for name in names}
    open_ = {place for place in read if len(clusters[place].options) > 1}
    if not open_ and len(read) == 1:
        # A parameter whose place is given has one option, and its views still go with it.
        return read.pop()
    return open_.pop() if len(open_) == 1 else None


def _join(
    graph: Graph, cluster: Cluster, op: Op, place: int, home: Mapping[str, int], offered: Sequence[MeshStrategy]
) -> bool:
    """Add `op` to the cluster if it follows under every option; return whether it did."""
    reps = [graph.representative(ref.op) for ref in op.refs]
    slots = [slot for slot, rep in enumerate(reps) if home[rep] == place]
    moved_now = max(graph.meta(op.refs[slot]).nbytes for slot in slots)
    moved_later = sum(meta.nbytes for meta in op.outputs if meta is not None)
    starts = {graph.by_name[reps[slot]].kind for slot in slots}
    if moved_later > moved_now or "tangent" in starts or (starts == {"parameter"} and len(slots) < len(reps)):
        return False
    by_need: dict[object, list[MeshStrategy]] = {}
    for strategy in offered:
        by_need.setdefault(tuple(strategy.inputs[slot] for slot in slots), []).append(strategy)
    follows = []
    for option in range(len(cluster.options)):
        need = tuple(cluster.strategy(reps[slot], option).outputs[op.refs[slot].index] for slot in slots)
        fitting = by_need.get(need, [])
        if len({strategy.outputs for strategy in fitting}) != 1:
            return False
        follows.append(fitting[0])
    cluster.index[op.name] = len(cluster.members)
    cluster.members.append(op.name)
    cluster.options = [(*done, new) for done, new in zip(cluster.options, follows, strict=True)]
    return True
