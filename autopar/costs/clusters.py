"""Operators whose strategy follows from that of the one operator they read.

A view, a cast to a smaller type or an elementwise function of one tensor takes
its layout from its input. Redistributing before or after it moves the same
bytes, so that deciding it apart would gain nothing: such followers join their
producer's cluster, and the search decides clusters. Where others read the
producer, too, a follower of the same size decides for itself: it may read what
was moved for them (a gradient gathered for one product, and transposed for
another; tokens that experts had in forward), in place of moving it once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Op, once_per_graph
from autopar.ir.placement import Replicate, Shard
from autopar.ir.roles import is_view
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


def _has_others(graph: Graph, rep: str) -> bool:
    """Return whether more than one operator reads what an operator computes."""
    return graph.by_name[rep].kind == "call" and len(_readers(graph)[rep]) > 1


@once_per_graph
def _readers(graph: Graph) -> dict[str, frozenset[str]]:
    """Return, for each representative operator, the representatives that read it or an instance of it."""
    found: dict[str, set[str]] = {graph.representative(op.name): set() for op in graph.ops}
    for op in graph.ops:
        for ref in op.refs:
            found[graph.representative(ref.op)].add(graph.representative(op.name))
    return {rep: frozenset(readers) for rep, readers in found.items()}


@once_per_graph
def _sources(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return, for each representative operator, what each of its slots reads, if all its instances read the same.

    Absent where instances read different representatives (the first of a stack of layers reads
    the embedding), or the count of instances differs from that of what they read: unless that is a
    parameter, which only some layers read again.
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
    return {
        rep: names
        for rep, names in found.items()
        if all(count[n] in {1, count[rep]} or graph.by_name[n].kind == "parameter" for n in names)
    }


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
    # What every rank has whole is no reason to compute with all of it: a part of it is next to nothing to take.
    if "input" in starts and not is_view(op):
        return False
    if moved_later == moved_now and any(_has_others(graph, reps[slot]) for slot in slots):
        return False
    if moved_later > moved_now or "tangent" in starts or (starts == {"parameter"} and len(slots) < len(reps)):
        return False
    by_need: dict[object, list[MeshStrategy]] = {}
    for strategy in offered:
        by_need.setdefault(tuple(strategy.inputs[slot] for slot in slots), []).append(strategy)
    follows = []
    for option in range(len(cluster.options)):
        need = tuple(cluster.strategy(reps[slot], option).outputs[op.refs[slot].index] for slot in slots)
        # A plan that is priced again has one strategy each: its views may read a parameter gathered.
        fitting = by_need.get(need, list(offered) if _is_decided(graph, cluster, op, offered) else [])
        if len({strategy.outputs for strategy in fitting}) != 1:
            return False
        follows.append(fitting[0])
    cluster.index[op.name] = len(cluster.members)
    cluster.members.append(op.name)
    cluster.options = [(*done, new) for done, new in zip(cluster.options, follows, strict=True)]
    return True


def _is_decided(graph: Graph, cluster: Cluster, op: Op, offered: Sequence[MeshStrategy]) -> bool:
    of_parameter = graph.by_name[cluster.members[0]].kind == "parameter"
    return of_parameter and is_view(op) and len(offered) == len(cluster.options) == 1


def gathered_first(
    graph: Graph, cluster: Cluster, option: tuple[MeshStrategy, ...], choices: Mapping[str, Sequence[MeshStrategy]]
) -> list[tuple[MeshStrategy, ...]]:
    """Return an option of a parameter's cluster with views of what is gathered, in place of gathers of each view.

    One for each set of axes that it may be gathered along; none where nothing views the parameter, or where no view can
    be had so. A matrix that forward reads transposed and backward as it lies is so gathered once for both. A cast stays
    before the gather, which moves fewer bytes.
    """
    return _with_views(graph, cluster, option, _first_views(graph, cluster), choices)


def gathered_in_phase(
    graph: Graph, cluster: Cluster, option: tuple[MeshStrategy, ...], choices: Mapping[str, Sequence[MeshStrategy]]
) -> list[tuple[MeshStrategy, ...]]:
    """Return an option of a parameter's cluster with views of a gathered view of its phase, one for each set of axes.

    Where a block is computed again, backward reads its matrices transposed for that and as they lie for the gradients
    of its inputs: one gather serves both. None where no phase views a view that it made itself.
    """
    if not _reads_itself_only(graph, cluster):
        return []
    views = {name for name in cluster.members if is_view(graph.by_name[name])}
    again = set()
    for name in views:
        source = _read(graph, graph.by_name[name])
        if source in views and graph.by_name[source].phase == graph.by_name[name].phase:
            again.add(name)
    # A view of one of these follows it.
    first = frozenset(name for name in again if _read(graph, graph.by_name[name]) not in again)
    return _with_views(graph, cluster, option, first, choices)


def _with_views(
    graph: Graph,
    cluster: Cluster,
    option: tuple[MeshStrategy, ...],
    first: frozenset[str],
    choices: Mapping[str, Sequence[MeshStrategy]],
) -> list[tuple[MeshStrategy, ...]]:
    """Return the option with the views `first` reading what is gathered, for each set of axes; none if none can be."""
    found = []
    for axes in _gatherable(option[0]) if first else ():
        made: dict[str, MeshStrategy] = dict(zip(cluster.members, option, strict=True))
        if all(_view_gathered(graph, cluster, name, made, axes, first, choices) for name in cluster.members[1:]):
            found.append(tuple(made[name] for name in cluster.members))
    return found


def _gatherable(parameter: MeshStrategy) -> Iterator[frozenset[int]]:
    """Return every set of axes along which a parameter may be gathered."""
    split = [place for place, each in enumerate(parameter.axes) if isinstance(each.outputs[0], Shard)]
    for count in range(1, len(split) + 1):
        yield from map(frozenset, itertools.combinations(split, count))


def _first_views(graph: Graph, cluster: Cluster) -> frozenset[str]:
    """Return the members that view a parameter, or its last cast, and not another view."""
    if not _reads_itself_only(graph, cluster):
        return frozenset()
    views = {name for name in cluster.members if is_view(graph.by_name[name])}
    reads = {name: _read(graph, graph.by_name[name]) for name in cluster.members[1:]}
    before_casts: set[str] = set()
    for name in reversed(cluster.members[1:]):
        if name not in views or name in before_casts:
            before_casts.add(reads[name])
    return frozenset(
        name for name in views if name not in before_casts and (reads[name] not in views or reads[name] in before_casts)
    )


def _reads_itself_only(graph: Graph, cluster: Cluster) -> bool:
    """Return whether members read the parameter and one another; what reads more was joined, and follows as it is."""
    return all(len(graph.by_name[name].refs) == 1 for name in cluster.members[1:])


def _read(graph: Graph, op: Op) -> str:
    return graph.representative(op.refs[0].op)


def _view_gathered(
    graph: Graph,
    cluster: Cluster,
    name: str,
    made: dict[str, MeshStrategy],
    axes: frozenset[int],
    first: frozenset[str],
    choices: Mapping[str, Sequence[MeshStrategy]],
) -> bool:
    """Put the strategy of a member that reads a gathered value in place of its own; return whether there is one."""
    op = graph.by_name[name]
    source, index = made[_read(graph, op)], op.refs[0].index
    if name in first:
        wanted = [Replicate() if k in axes else each.outputs[index] for k, each in enumerate(source.axes)]
        fitting = [s for s in choices[name] if [each.inputs[0] for each in s.axes] == wanted]
    elif source.outputs[index] == made[name].inputs[0]:
        return True
    else:
        fitting = [s for s in choices[name] if s.inputs[0] == source.outputs[index]]
    if len({each.outputs for each in fitting}) != 1:
        return False
    made[name] = fitting[0]
    return True
