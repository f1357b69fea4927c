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
from autopar.costs.clusters import Cluster, build, gathered_first, gathered_in_phase
from autopar.costs.copies import Copies
from autopar.costs.links import TRAVELS, UNREACHABLE, Links
from autopar.costs.liveness import CopyLife, Holdings, gradient_indices, is_term, prefetched
from autopar.costs.optimizer import optimizer_seconds
from autopar.costs.regathers import sharers_again
from autopar.costs.segments import Segments
from autopar.costs.sharing import Reader, Sharing, sharers
from autopar.costs.stage_memory import Split, StageHoldings
from autopar.costs.surroundings import surroundings
from autopar.costs.workspaces import workspace_bytes
from autopar.ir.graph import Graph, Op, Ref
from autopar.ir.microbatches import parted
from autopar.ir.placement import Layout, Partial, Replicate, Shard, is_at_rest
from autopar.ir.plan import Gather, Reduce
from autopar.ir.roles import base_of, is_view, parameter_like
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

    without_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that operators which are not in the table take at least, all that they stand for together."""

    def staged(self, split: Split) -> Pricing:
        """Return the same with the memory of pipeline ranks under an assumed cut, in place of the whole program's."""
        held = StageHoldings(self.holdings, split)
        return replace(self, table=replace(self.table, memory_row=held.row, memory_curve=held.curve, freed=None))


@dataclass
class Builder:
    """Builds the table of one graph on one mesh."""

    graph: Graph
    choices: Mapping[str, Sequence[MeshStrategy]]
    links: Links
    optimizer: str
    gathers: frozenset[Gather] = frozenset({"per_phase", "once"})
    """How parameters sharded at rest may be gathered."""

    reductions: frozenset[Reduce] = frozenset({"step", "microbatch"})
    """When the gradients of parameters sharded at rest may be brought to their place."""

    sums_in_float32: bool = False
    """Whether gradients of 16 bits are cast to their float32 parameter's type before they are summed over ranks."""

    without: frozenset[str] = frozenset()
    """Operators whose work takes no time in the table."""

    outputs: Mapping[str, Layout] = field(default_factory=dict)
    """Layouts of user outputs that are decided already; others may have any that a user can get them in."""

    segments: Segments = field(init=False)
    clusters: list[Cluster] = field(init=False)
    home: dict[str, int] = field(init=False)
    sinks: dict[str, int] = field(init=False, default_factory=dict)
    sink_layouts: dict[str, list[Layout]] = field(init=False, default_factory=dict)
    _seconds: dict[tuple[object, ...], Floats] = field(init=False, default_factory=dict)
    _without_s: dict[str, float] = field(init=False, default_factory=dict)

    def build(self) -> Pricing:
        """Return the priced table."""
        graph = self.graph
        self.segments = Segments.of(graph)
        self.clusters, self.home = build(graph, self.choices)
        self._parameters = parameter_like(graph)
        self._base = {name: base for (name, index), (base, _) in base_of(graph).items() if index == 0}
        self._microbatches = prod(self.links.sizes[: self.links.time_axes])
        self._offer_ways()
        nodes = [self._node(cluster) for cluster in self.clusters]
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
            microbatches=self._microbatches,
        )
        return Pricing(
            table, self.clusters, self.home, self.sinks, self.sink_layouts, holdings, without_s=self._without_s
        )

    def _workspaces(self) -> dict[str, Floats]:
        """Return what operators hold while they run, by representative and option; those that hold nothing left out."""
        found = {}
        for cluster in self.clusters:
            for place, member in enumerate(cluster.members):
                op = self.graph.by_name[member]
                metas = tuple(self.graph.meta(ref) for ref in op.refs)
                strategies = [option[place] for option in cluster.options]
                held = workspace_bytes(op, metas, strategies, self.links.sizes, self.links.cluster.device)
                if held is not None:
                    found[member] = held
        return found

    def _offer_ways(self) -> None:
        """Give each sharded option of a parameter twins: it keeps its gathered copies, or its gradients come early.

        Who keeps what it gathers has room for whole gradients, and so is offered both only where it is to.
        """
        for cluster in self.clusters:
            op = self.graph.by_name[cluster.members[0]]
            if op.kind != "parameter":
                continue
            sharded = [o for o in cluster.options if any(isinstance(p, Shard) for p in o[0].outputs[0] or ())]
            whole = [option for option in cluster.options if option not in sharded]
            once = [way == "once" for way in ("per_phase", "once") if way in self.gathers]
            early = [way == "microbatch" for way in ("step", "microbatch") if way in self.reductions]
            if self._microbatches == 1 or self.links.flat_bytes or not op.requires_grad:
                early = [self._microbatches > 1 and self.links.reduces_each and op.requires_grad]
            both = len(early) == 1 or len(once) == 1
            ways = [(kept, now) for now in early for kept in once if both or not (kept and now)]
            kept_whole = (
                sharded
                if True not in once
                else [each for o in sharded for each in gathered_first(self.graph, cluster, o, self.choices) or [o]]
            )
            in_phase = sharded
            if False in once:
                more = (each for o in sharded for each in gathered_in_phase(self.graph, cluster, o, self.choices))
                in_phase = [*sharded, *more]
            offered = [(o, kept, now) for kept, now in ways for o in (kept_whole if kept else in_phase)]
            cluster.options = [*whole, *(o for o, _, _ in offered)]
            cluster.once = [False] * len(whole) + [kept for _, kept, _ in offered]
            cluster.early = [False] * len(whole) + [now for _, _, now in offered]

    def _node(self, cluster: Cluster) -> Node:
        instances = self.graph.instances
        total: Floats = np.zeros((len(cluster.options), self.segments.total))
        optimizer = np.zeros(len(cluster.options))
        for place, member in enumerate(cluster.members):
            op = self.graph.by_name[member]
            strategies = [option[place] for option in cluster.options]
            metas = tuple(self.graph.meta(ref) for ref in op.refs)
            once = self._op_seconds(op, metas, strategies)
            if member in self.without:
                self._without_s[member] = float(once.min()) * self._microbatches * len(instances[member])
            else:
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
        summed = gradient_indices(self.graph, op) if self._microbatches > 1 and self.links.sums_whole else ()
        around = surroundings(self.graph, op)
        key = (op.target, metas, op.outputs, tuple(id(s) for s in strategies), str(op.args[-4:]), summed, around)
        if key not in self._seconds:
            device, sizes = self.links.cluster.device, self.links.sizes
            plain = operators.seconds(op, metas, strategies, sizes, device, around)
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
            decided = self.outputs.get(output.name)
            self.sink_layouts[output.name] = self._output_layouts(output.ref) if decided is None else [decided]
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
        for sharing, (counts, gone) in sharers_again(self.graph).items() if self.links.again_axes else ():
            for group, copy in self._build_again(nodes, sharing, counts, gone):
                groups.append(group)
                copies.append(copy)
        return groups, copies

    def _build_again(
        self, nodes: list[Node], sharing: Sharing, counts: Floats, gone: Sequence[tuple[int, int]]
    ) -> list[tuple[Group, CopyLife]]:
        """Return the copies of an activation that are gathered once more for those who read it later."""
        source, meta = self.home[sharing.producer], self.graph.by_name[sharing.producer].outputs[sharing.index]
        if meta is None:
            return []
        sources, layout = self._made(sharing)
        demands, ways = self._needs(sharing)
        wanted = [each for each, _ in ways]
        copies = Copies(self.graph, self.links, sharing.producer, meta, sources, wanted, tuple(gone))
        name = f"{sharing.producer}.{sharing.index}.again"
        price = copies.again_s
        group = Group(
            name, source, layout, demands, price, np.zeros_like(price), "critical", self._microbatches * counts
        )
        return [(each, copies.gone) for each in self._drop_own(group)]

    def _made(self, sharing: Sharing) -> tuple[list[Layout], npt.NDArray[np.int64]]:
        """Return the layouts that a value may be made in, and which of them each option of its node makes."""
        cluster = self.clusters[self.home[sharing.producer]]
        made = [cluster.strategy(sharing.producer, k).outputs[sharing.index] for k in range(len(cluster.options))]
        sources = list(dict.fromkeys(layout for layout in made if layout is not None))
        return sources, np.array([sources.index(each) if each is not None else 0 for each in made], dtype=np.int64)

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
        starts = sharing.producer in self._parameters
        # What is computed from a parameter may be decided with it, and is moved like any other value.
        once = np.array((starts and cluster.once) or [False] * len(cluster.options))
        if meta is None or (starts and sharing.phase == "both" and not once.any()):
            return []
        sources, layout = self._made(sharing)
        demands, ways = self._needs(sharing)
        wanted, inside = [each for each, _ in ways], np.array([each for _, each in ways])
        together = self.links.flat_bytes or self.links.bucket_bytes
        travels = TRAVELS.get(sharing.category, ()) if together else ()
        copies = Copies(self.graph, self.links, sharing.producer, meta, sources, wanted, tuple(lives), travels)
        # What is gathered once is there for all micro-batches.
        kept = starts and sharing.phase == "both" and self._microbatches > 1
        price, hidden, ends = self._prices(sharing, copies, inside, kept=kept)
        copy = self._held(sharing, copies, inside, kept=kept, alone=len(demands) == 1)
        copy = replace(copy, of_parameter=starts)
        if once.any():
            paid = sharing.phase == "both"
            price, hidden, ends = (_by_gather(each, paid_if_kept=paid) for each in (price, hidden, ends))
            beside = tuple(replace(each, bytes=_by_gather(each.bytes, paid_if_kept=paid)) for each in copy.beside)
            copy = replace(copy, bytes=_by_gather(copy.bytes, paid_if_kept=paid), beside=beside)
            layout = layout + len(sources) * once
        times = 1 if sharing.category == "reduction" or kept else self._microbatches
        name = f"{sharing.producer}.{sharing.index}.{sharing.phase}"
        some = ends if ends.any() else None
        group = Group(name, source, layout, demands, price, hidden, sharing.category, times * counts, some)
        return [(each, copy) for each in self._drop_own(group)]

    def _needs(self, sharing: Sharing) -> tuple[tuple[Demand, ...], list[tuple[Layout, bool]]]:
        """Return what readers demand, and the ways to have it: a layout, and if each micro-batch reduces its own."""
        needs = []
        for reader in sharing.readers:
            node, demanded = self._demand(reader)
            needs.append((node, list(zip(demanded, self._inside(sharing, reader, len(demanded)), strict=True))))
        ways = list(dict.fromkeys(each for _, pairs in needs for each in pairs))
        demands: dict[tuple[int, bytes], Demand] = {}
        for node, pairs in needs:
            column = np.array([ways.index(each) for each in pairs], dtype=np.int64)
            demands.setdefault((node, column.tobytes()), Demand(node, column))
        return tuple(demands.values()), ways

    def _prices(
        self, sharing: Sharing, copies: Copies, inside: npt.NDArray[np.bool_], *, kept: bool
    ) -> tuple[Floats, Floats, Floats]:
        """Return [source layouts, demanded layouts] the seconds of a redistribution, and what can hide of them.

        In each micro-batch, then in one of several.
        """
        meta, price = copies.meta, copies.routes.price_s.copy()
        if self._is_cast_up(sharing, meta):
            price[self._in_other_type(copies.sources, copies.wanted)] = UNREACHABLE
        if sharing.producer in self._parameters and self.links.kept_axis >= 0:
            price[self._gathered_along(self.links.kept_axis, copies.sources, copies.wanted)] = UNREACHABLE
        if sharing.category == "reduction" and self.links.kept_axis >= 0:
            price[self._scattered_along(self.links.kept_axis, copies.sources, copies.wanted)] = UNREACHABLE
        hidden = np.where(np.isfinite(price), 0.0, price)
        ends = np.zeros_like(price)
        # Sums of micro-batches' gradients are reduced with the last of them: all of what hides is the outcome's.
        apart = sharing.category == "reduction" and self._microbatches > 1
        if sharing.category != "critical":
            behind = copies.routes.hidable_s
            once = np.isfinite(price) & (np.full(len(inside), kept) | (apart & ~inside))
            hidden, ends = np.where(once, hidden, behind), np.where(once, behind, ends)
        times = np.where(inside, self._microbatches, 1)
        return price * times, hidden * times, ends

    def _held(
        self, sharing: Sharing, copies: Copies, inside: npt.NDArray[np.bool_], *, kept: bool, alone: bool
    ) -> CopyLife:
        """Return what the copies of one value hold, and when."""
        if kept:
            return copies.kept
        if sharing.category == "reduction" and self._microbatches == 1:
            return copies.reduced
        if inside.any():
            return copies.early(inside, alone=alone)
        return copies.summed if sharing.category == "reduction" else copies.plain

    def _inside(self, sharing: Sharing, reader: Reader, options: int) -> list[bool]:
        """Return, by option of a reader, whether it reads a gradient's reduction made in each micro-batch.

        What is read on the way to a gradient is; the gradient itself where its parameter's option says so.
        """
        if sharing.category != "reduction" or self._microbatches == 1 or self.links.sums_whole:
            return [False] * options
        kind, _, name = reader.op.partition(":")
        if kind != "gradient" or not name:
            return [True] * options
        return self.clusters[self.home[name]].early or [False] * options

    def _is_cast_up(self, sharing: Sharing, meta: TensorMeta) -> bool:
        """Return whether what a group moves is a gradient of 16 bits that is cast to its parameter's larger type."""
        if sharing.category != "reduction" or not meta.is_floating or meta.item_bytes >= 4:
            return False
        readers = [self.graph.by_name.get(reader.op) for reader in sharing.readers]
        made = [op.outputs[0] if op is not None and not is_view(op) else None for op in readers]
        return all(each is not None and each.item_bytes > meta.item_bytes for each in made)

    @staticmethod
    def _gathered_along(axis: int, sources: Sequence[Layout], wanted: Sequence[Layout]) -> npt.NDArray[np.bool_]:
        """Return which redistributions gather along an axis."""
        return np.array([[isinstance(a[axis], Shard) and a[axis] != b[axis] for b in wanted] for a in sources])

    @staticmethod
    def _scattered_along(axis: int, sources: Sequence[Layout], wanted: Sequence[Layout]) -> npt.NDArray[np.bool_]:
        """Return which redistributions scatter a sum along an axis."""
        return np.array(
            [[isinstance(a[axis], Partial) and isinstance(b[axis], Shard) for b in wanted] for a in sources]
        )

    def _in_other_type(self, sources: Sequence[Layout], wanted: Sequence[Layout]) -> npt.NDArray[np.bool_]:
        """Return which redistributions of a gradient that is then cast up are not to be.

        Sums over micro-batches are float32 always: many terms in 16 bits lose what the parameter could take up. What
        is reduced in each micro-batch, before it is cast and added to them, need not be.
        """
        if self.sums_in_float32 or (self._microbatches > 1 and self.links.sums_whole):
            return np.array([[is_term(a) and a != b for b in wanted] for a in sources])
        either = self._microbatches > 1
        return np.array([[not either and is_term(a) and is_term(b) for b in wanted] for a in sources])

    def _drop_own(self, group: Group) -> list[Group]:
        """Return the group without demands of the source's own node that cost nothing, if anything remains of it.

        A parameter's are left: its views may read it gathered, and what that holds and hides is the group's. So is what
        hides behind one of several micro-batches.
        """
        if group.category == "prefetch" or group.at_end_s is not None:
            return [group] if group.price_s.any() else []
        paid = tuple(d for d in group.demands if d.node != group.source or group.price_s[group.layout, d.layout].any())
        return [replace(group, demands=paid)] if paid and group.price_s.any() else []


def _by_gather(amounts: Floats, *, paid_if_kept: bool) -> Floats:
    """Return amounts for sources that gather per phase, then for those that keep what they gathered.

    A parameter's readers form one group a phase, which the former pay, and one over
    both phases, which the latter pay.
    """
    free = np.where(np.isfinite(amounts), 0.0, amounts)
    return np.vstack([free, amounts] if paid_if_kept else [amounts, free])
