"""Graph, strategies and cluster to the table that the search reads.

Equal layers are priced once and counted: a node's seconds are those of all its
instances, and the edges between instances are grouped by which readers share a
redistributed copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import numpy.typing as npt

from autopar.costs import operators
from autopar.costs.clusters import Cluster, build
from autopar.costs.fusion import fused_traffic
from autopar.costs.links import UNREACHABLE, Links
from autopar.costs.liveness import (
    CopyLife,
    Holdings,
    base_of,
    gradient_indices,
    gradients_of,
    is_term,
    local_bytes,
    prefetched,
    settled_at,
)
from autopar.costs.optimizer import optimizer_seconds
from autopar.costs.segments import Segments
from autopar.costs.sharing import Reader, Sharing, sharers
from autopar.costs.stage_memory import Split, StageHoldings
from autopar.costs.workspaces import gather_bytes, workspace_bytes
from autopar.ir.graph import Graph, Op, Ref
from autopar.ir.microbatches import parted
from autopar.ir.placement import Layout, Replicate, Shard, is_at_rest
from autopar.ir.plan import Gather
from autopar.ir.reshard import Step, route
from autopar.ir.roles import is_view, parameter_like
from autopar.ir.strategy import MeshStrategy
from autopar.ir.table import CostTable, Demand, Floats, Group, Node
from autopar.ir.tensor import TensorMeta


@dataclass
class Pricing:
    """A cost table, and what its nodes, options and layouts stand for."""

    table: CostTable
    clusters: list[Cluster]
    home: dict[str, int]
    sinks: dict[str, int]
    """Output name to the node that decides its layout."""

    sink_layouts: dict[str, list[Layout]]
    holdings: Holdings
    """What the table's memory is computed from."""

    def staged(self, split: Split) -> Pricing:
        """Return the same with the memory of pipeline ranks under an assumed cut, in place of the whole program's."""
        held = StageHoldings(self.holdings, split)
        return replace(self, table=replace(self.table, memory_row=held.row, memory_curve=held.curve))


@dataclass
class Builder:
    """Builds the table of one graph on one mesh."""

    graph: Graph
    choices: Mapping[str, Sequence[MeshStrategy]]
    links: Links
    optimizer: str
    gathers: frozenset[Gather] = frozenset({"per_phase", "once"})
    """How parameters sharded at rest may be gathered."""

    sums_in_float32: bool = False
    """Whether gradients of 16 bits are cast to their float32 parameter's type before they are summed over ranks."""

    segments: Segments = field(init=False)
    clusters: list[Cluster] = field(init=False)
    home: dict[str, int] = field(init=False)
    sinks: dict[str, int] = field(init=False, default_factory=dict)
    sink_layouts: dict[str, list[Layout]] = field(init=False, default_factory=dict)
    _seconds: dict[tuple[object, ...], Floats] = field(init=False, default_factory=dict)

    def build(self) -> Pricing:
        """Return the priced table."""
        graph = self.graph
        self.segments = Segments.of(graph)
        self.clusters, self.home = build(graph, self.choices)
        self._parameters = parameter_like(graph)
        self._base = {name: base for (name, index), (base, _) in base_of(graph).items() if index == 0}
        self._offer_kept_gathers()
        instances: dict[str, list[Op]] = {}
        for op in graph.ops:
            instances.setdefault(graph.representative(op.name), []).append(op)
        self._microbatches = prod(self.links.sizes[: self.links.time_axes])
        nodes = [self._node(cluster, instances) for cluster in self.clusters]
        self._add_sinks(nodes)
        groups, copies = self._groups(nodes)
        reserved = float(self.links.cluster.device.reserved_bytes)
        holdings = Holdings(
            graph, self.clusters, self.home, self.links.sizes, self.optimizer, copies, reserved,
            accumulates=self._microbatches > 1, workspaces=self._workspaces(),
        )  # fmt: skip
        table = CostTable(
            nodes=tuple(nodes),
            groups=tuple(groups),
            forward_segments=self.segments.forward,
            segments=self.segments.total,
            memory_row=holdings.row,
            memory_curve=holdings.curve,
        )
        return Pricing(table, self.clusters, self.home, self.sinks, self.sink_layouts, holdings)

    def _workspaces(self) -> dict[str, Floats]:
        """Return what operators hold while they run, by representative and option; those that hold nothing left out."""
        found = {}
        for cluster in self.clusters:
            for place, member in enumerate(cluster.members):
                op = self.graph.by_name[member]
                metas = tuple(self.graph.meta(ref) for ref in op.refs)
                strategies = [option[place] for option in cluster.options]
                held = workspace_bytes(op, metas, strategies, self.links.sizes, self.links.cluster.device.kind)
                if held is not None:
                    found[member] = held
        return found

    def _offer_kept_gathers(self) -> None:
        """Give each sharded option of a parameter a twin that keeps its gathered copies for backward."""
        for cluster in self.clusters:
            if self.graph.by_name[cluster.members[0]].kind != "parameter":
                continue
            sharded = [o for o in cluster.options if any(isinstance(p, Shard) for p in o[0].outputs[0] or ())]
            whole = [option for option in cluster.options if option not in sharded]
            ways = [way for way in ("per_phase", "once") if way in self.gathers]
            cluster.options = [*whole, *(sharded * len(ways))]
            cluster.once = [False] * len(whole) + [way == "once" for way in ways for _ in sharded]

    def _node(self, cluster: Cluster, instances: Mapping[str, Sequence[Op]]) -> Node:
        total: Floats = np.zeros((len(cluster.options), self.segments.total))
        optimizer = np.zeros(len(cluster.options))
        for place, member in enumerate(cluster.members):
            op = self.graph.by_name[member]
            strategies = [option[place] for option in cluster.options]
            metas = tuple(self.graph.meta(ref) for ref in op.refs)
            once = self._op_seconds(op, metas, strategies)
            total += np.outer(once, self._microbatches * self.segments.counts(instances[member]))
            if op.kind == "parameter" and op.requires_grad:
                layouts = [s.outputs[0] for s in strategies]
                optimizer += len(instances[member]) * optimizer_seconds(
                    op, layouts, self.links.sizes, self.optimizer, self.links.cluster.device
                )
        return Node(cluster.members[0], total, optimizer)

    def _op_seconds(self, op: Op, metas: tuple[TensorMeta, ...], strategies: list[MeshStrategy]) -> Floats:
        if op.kind != "call" or is_view(op):
            return np.zeros(len(strategies))
        fused = fused_traffic(self.graph).get(op.name)
        summed = gradient_indices(self.graph, op) if self._microbatches > 1 and self.links.flat_bytes else ()
        key = (op.target, metas, op.outputs, tuple(id(s) for s in strategies), str(op.args[-4:]), fused, summed)
        if key not in self._seconds:
            device, sizes = self.links.cluster.device, self.links.sizes
            plain = operators.seconds(op, metas, strategies, sizes, device, fused)
            if summed:
                plain = plain + operators.accumulation_seconds(op, summed, strategies, sizes, device)
            inner = np.array([self.links.inner_s(op, metas, s) for s in strategies])
            self._seconds[key] = plain + inner
        return self._seconds[key]

    def _add_sinks(self, nodes: list[Node]) -> None:
        """Add a decision for each user output without a tangent; one with a tangent has the layout of that."""
        tangents = {op.target: op.name for op in self.graph.ops if op.kind == "tangent"}
        for output in self.graph.outputs:
            if output.kind != "output" or output.ref is None:
                continue
            if output.name in tangents:
                self.sinks[output.name] = self.home[self.graph.representative(tangents[output.name])]
                continue
            self.sinks[output.name] = len(nodes)
            self.sink_layouts[output.name] = self._output_layouts(output.ref)
            count = len(self.sink_layouts[output.name])
            nodes.append(Node(f"output {output.name}", np.zeros((count, self.segments.total)), np.zeros(count)))

    def _output_layouts(self, ref: Ref) -> list[Layout]:
        """Return the layouts a user can get an output in: whole, or any even split that its producer makes."""
        rep = self.graph.representative(ref.op)
        cluster = self.clusters[self.home[rep]]
        made = [cluster.strategy(rep, k).outputs[ref.index] for k in range(len(cluster.options))]
        sizes, time = self.links.sizes, self.links.time_axes
        # Along time an output is put together from what the micro-batches give, however they do.
        along = [layout[:time] for layout in made if layout is not None]
        whole: Layout = (*along[0], *(Replicate(),) * (len(sizes) - time))
        split = [layout for layout in made if layout is not None and self._rests(layout)]
        return list(dict.fromkeys([whole, *(split if self.graph.meta(ref).shape else [])]))

    def _rests(self, layout: Layout) -> bool:
        """Return whether a rank may hold each micro-batch's part in this layout outside the program."""
        sizes = self.links.sizes
        if self.links.time_axes:
            _, layout = parted(layout, sizes[0])
        return is_at_rest(layout, sizes[self.links.time_axes :])

    def _groups(self, nodes: list[Node]) -> tuple[list[Group], list[CopyLife]]:
        groups: list[Group] = []
        copies: list[CopyLife] = []
        early: dict[str, list[int]] = {}
        for sharing, (counts, lives) in sharers(self.graph).items():
            for group, copy in self._build_group(nodes, sharing, counts, lives):
                if sharing.category == "prefetch":
                    early.setdefault(sharing.phase, []).append(len(groups))
                groups.append(group)
                copies.append(copy)
        for numbers in early.values():
            self._note_early(groups, copies, numbers)
        return groups, copies

    def _note_early(self, groups: Sequence[Group], copies: list[CopyLife], numbers: Sequence[int]) -> None:
        """Note of gathered parameters of one phase where their gathers are issued if the plan does not say."""
        gathers = []
        for number in numbers:
            producer = groups[number].name.split(".")[0]
            meta = self.graph.by_name[producer].outputs[0]
            size = float(meta.nbytes) if meta is not None else 0.0
            gathers += [(first, last, size) for first, last in copies[number].lives]
        issued = iter(prefetched(gathers))
        for number in numbers:
            early = tuple((next(issued), last) for _, last in copies[number].lives)
            copies[number] = replace(copies[number], early=early)

    def _demand(self, reader: Reader) -> tuple[int, list[Layout]]:
        """Return the node that a reader belongs to, and the layout it needs under each of the node's options."""
        kind, _, name = reader.op.partition(":")
        if kind == "output" and name in self.sink_layouts:
            return self.sinks[name], self.sink_layouts[name]
        if kind in {"output", "gradient", "mutation"} and name:
            node = self.sinks[name] if kind == "output" else self.home[name]
            cluster = self.clusters[node]
            member = cluster.members[0] if kind == "output" else name
            layouts = [cluster.strategy(member, k).outputs[0] for k in range(len(cluster.options))]
            return node, [layout for layout in layouts if layout is not None]
        cluster = self.clusters[self.home[reader.op]]
        return self.home[reader.op], [
            cluster.strategy(reader.op, k).inputs[reader.slot] for k in range(len(cluster.options))
        ]

    def _build_group(
        self, nodes: list[Node], sharing: Sharing, counts: Floats, lives: Sequence[tuple[int, int]]
    ) -> list[tuple[Group, CopyLife]]:
        source = self.home[sharing.producer]
        cluster = self.clusters[source]
        meta = self.graph.by_name[sharing.producer].outputs[sharing.index]
        once = np.array(cluster.once or [False] * len(cluster.options))
        starts = sharing.producer in self._parameters
        if meta is None or (starts and sharing.phase == "both" and not once.any()):
            return []
        made = [cluster.strategy(sharing.producer, k).outputs[sharing.index] for k in range(len(cluster.options))]
        sources = list(dict.fromkeys(layout for layout in made if layout is not None))
        layout = np.array([sources.index(each) if each is not None else 0 for each in made], dtype=np.int64)
        needs = [self._demand(reader) for reader in sharing.readers]
        wanted = list(dict.fromkeys(each for _, layouts in needs for each in layouts))
        demands: dict[tuple[int, bytes], Demand] = {}
        for node, layouts in needs:
            column = np.array([wanted.index(each) for each in layouts], dtype=np.int64)
            demands.setdefault((node, column.tobytes()), Demand(node, column))
        flat = sharing.category != "critical" and bool(self.links.flat_bytes)
        price = np.array([[self.links.route_s(a, b, meta, flat=flat) for b in wanted] for a in sources])
        if self._is_cast_up(sharing, meta):
            price[self._in_other_type(sources, wanted)] = UNREACHABLE
        # Gradients of micro-batches are added up before they are reduced: nothing is left to hide behind.
        apart = sharing.category == "reduction" and self._microbatches > 1 and not self.links.hides_reductions
        alone = sharing.category == "critical" or apart
        times = 1 if sharing.category == "reduction" else self._microbatches
        hidden = np.where(np.isfinite(price), 0.0, price)
        if not alone:
            hidden = np.array(
                [[self.links.route_s(a, b, meta, hidable=True, flat=flat) for b in wanted] for a in sources]
            )
        held = np.array([[0.0 if a == b else local_bytes(meta, b, self.links.sizes) for b in wanted] for a in sources])
        producer = self.graph.by_name[sharing.producer]
        routes = [[self._route(a, b, meta) for b in wanted] for a in sources]
        in_flight = np.array(
            [[gather_bytes(self.graph, producer, each, meta, self.links.sizes) for each in row] for row in routes]
        )
        tail = None
        if sharing.category == "reduction" and self._microbatches == 1:
            held, tail = self._scattered(sources, wanted, meta, held)
            if self._base[sharing.producer] not in {name for name, _ in gradients_of(self.graph)}:
                # What is cast once it is reduced: its cast stays, and itself until then.
                held = held + np.array(
                    [[local_bytes(meta, a, self.links.sizes) * (a != b) for b in wanted] for a in sources]
                )
                tail = None
            until = settled_at(self.graph)
            places = [self.graph.ops[first].name for first, _ in lives]
            lives = [
                (first, max(last, until.get(self._base[name], last)))
                for (first, last), name in zip(lives, places, strict=True)
            ]
        if once.any():
            kept = sharing.phase == "both"
            price, hidden, held, in_flight = (
                _by_gather(each, paid_if_kept=kept) for each in (price, hidden, held, in_flight)
            )
            layout = layout + len(sources) * once
        copy = CopyLife(tuple(lives), held, starts, tail, in_flight if in_flight.any() else None)
        name = f"{sharing.producer}.{sharing.index}.{sharing.phase}"
        group = Group(name, source, layout, tuple(demands.values()), price, hidden, sharing.category, times * counts)
        return [(each, copy) for each in self._drop_own(nodes, group)]

    def _is_cast_up(self, sharing: Sharing, meta: TensorMeta) -> bool:
        """Return whether what a group moves is a gradient of 16 bits that is cast to its parameter's larger type."""
        if sharing.category != "reduction" or not meta.is_floating or meta.item_bytes >= 4:
            return False
        readers = [self.graph.by_name.get(reader.op) for reader in sharing.readers]
        made = [op.outputs[0] if op is not None and not is_view(op) else None for op in readers]
        return all(each is not None and each.item_bytes > meta.item_bytes for each in made)

    def _in_other_type(self, sources: Sequence[Layout], wanted: Sequence[Layout]) -> npt.NDArray[np.bool_]:
        """Return which redistributions of a gradient that is then cast up are not to be.

        Sums over micro-batches are float32 always: many terms in 16 bits lose what the parameter could take up.
        """
        later = self.sums_in_float32 or self._microbatches > 1
        return np.array([[is_term(a) and (a != b if later else is_term(b)) for b in wanted] for a in sources])

    def _route(self, before: Layout, after: Layout, meta: TensorMeta) -> tuple[Step, ...]:
        """Return the steps from one layout to another, none if no steps lead there."""
        if before == after or not np.isfinite(self.links.route_s(before, after, meta)):
            return ()
        return route(before, after, meta.shape, self.links.sizes, self.links.time_axes)

    def _scattered(
        self, sources: Sequence[Layout], wanted: Sequence[Layout], meta: TensorMeta, held: Floats
    ) -> tuple[Floats, Floats]:
        """Return what redistributed gradients hold until they are waited for, and from then on.

        A sum over ranks is made in place. Of a scattered one the own part stays; on a CPU the terms of all other ranks
        are received beside it, and added up after the wait.
        """
        tail = np.zeros_like(held)
        exchanged = self.links.cluster.device.kind == "cpu"
        for i, have in enumerate(sources):
            for j, want in enumerate(wanted):
                if have == want or not np.isfinite(self.links.route_s(have, want, meta)):
                    continue
                ops = {message.op for message in self.links.route_messages(have, want, meta)}
                tail[i, j] = local_bytes(meta, want, self.links.sizes)
                if "reduce_scatter" in ops:
                    held[i, j] = local_bytes(meta, have if exchanged else want, self.links.sizes)
                elif ops == {"all_reduce"}:
                    held[i, j] = 0.0
        return held, tail

    def _drop_own(self, nodes: list[Node], group: Group) -> list[Group]:
        """Fold demands of the source's own node into its seconds; return the group if anything remains of it."""
        own = [d for d in group.demands if d.node == group.source]
        others = tuple(d for d in group.demands if d.node != group.source)
        node = nodes[group.source]
        extra: Floats = np.zeros(node.options)
        for demand in own:
            extra = np.maximum(extra, group.price_s[group.layout, demand.layout])
        if extra.any():
            nodes[group.source] = Node(node.name, node.seconds + np.outer(extra, group.counts), node.optimizer_s)
        if not others or not group.price_s.any():
            return []
        return [replace(group, demands=others)]


def _by_gather(amounts: Floats, *, paid_if_kept: bool) -> Floats:
    """Return amounts for sources that gather per phase, then for those that keep what they gathered.

    A parameter's readers form one group a phase, which the former pay, and one over
    both phases, which the latter pay.
    """
    free = np.where(np.isfinite(amounts), 0.0, amounts)
    return np.vstack([free, amounts] if paid_if_kept else [amounts, free])
