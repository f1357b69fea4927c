"""Seconds of collectives on the mesh of one cluster: the bridge from `ir.reshard` to `cost_models.collectives`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.costs.packing import Order, Packing, order_behind, packing
from autopar.costs.routes import Routes, Way
from autopar.ir.graph import Op
from autopar.ir.placement import Layout, local_shape
from autopar.ir.reshard import NoRouteError, Step, is_reachable, route
from autopar.ir.strategy import Inner, MeshStrategy
from autopar.ir.tensor import TensorMeta
from cost_models import compute
from cost_models.cluster import ClusterSpec
from cost_models.collectives import collective_s, host_s
from cost_models.overlap import overlap_efficiency
from cost_models.topology import Hop, axis_hops
from cost_models.two_level import pieces, ranks_inside, splits, two_level_s

UNREACHABLE = math.inf
"""Price of a redistribution that no sequence of steps makes."""

AGAIN = "gathered again"
"""In place of the operation, in shares of what is hidden: gathers that backward repeats."""

_CHUNKS = (1, 2, 4, 8, 16)
"""Chunks of a collective in two levels that are tried."""

TRAVELS = {"prefetch": ("all_gather",), "reduction": ("all_reduce", "reduce_scatter")}
"""What may travel with others of its kind, of parameters and of gradients, where it is all that moves one of them."""

_SURE = 0.9
"""A collective in two levels is taken where its price is less than this share of the flat one's: prices err, too."""


@dataclass(frozen=True, slots=True)
class Message:
    """One collective: operation, mesh axis, bytes of the larger of its local buffers."""

    op: str
    axis: int
    bytes: int
    flat: bool = False
    """Whether it is part of a larger one: frameworks flatten a layer's parameters, or gradients, into one buffer."""

    packed_bytes: int = 0
    """Bytes that are copied on the device, because its blocks lie inside rows of the tensor: `costs.packing`."""

    again: bool = False
    """Whether it gathers for backward what forward gathered: `costs.regathers`."""


@dataclass(frozen=True, slots=True)
class Price:
    """What one collective takes in the form that is fastest."""

    seconds: float
    host_s: float = 0.0
    """What a computing CPU core spends on its bytes, where the cluster says how much that is."""

    inner: int = 1
    """Ranks that share the inner of two levels; 1: it is one flat collective."""

    chunks: int = 1
    """Of two levels: in how many pieces, so that what is inside runs beside what is across."""

    least_s: float = 0.0
    """Seconds of the fastest form there is: another where two are too close to decide between."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """What one step of a way takes, and how what it makes lies in memory."""

    seconds: float
    hidable_s: float
    gathering_bytes: int
    order: Order


@dataclass
class Links:
    """Prices of moving data on a mesh laid row-major on a cluster; remembers what it has priced."""

    cluster: ClusterSpec
    sizes: tuple[int, ...]
    time_axes: int = 0
    """How many leading axes are in time: nothing moves along them."""

    sharded: tuple[int, float] = (-1, 0.0)
    """The axis over which an optimizer is sharded whose parameters are whole; bytes of a parameter over its gradient's.

    Gradients are then scattered, and new parameters gathered, in place of gradients' all-reduce.
    """

    across_axis: int = -1
    """The axis across groups that each hold a sharded optimizer; -1: there is one group. What is scattered inside a
    group is all-reduced across by each of its ranks."""

    hides_reductions: bool = False
    """Whether gradients summed over micro-batches are reduced behind the backward of the last of them."""

    gathers_ahead: bool = False
    """Whether the new parameters of a sharded optimizer are gathered behind the next step's forward."""

    flat_bytes: int = 0
    """Size of the buffers that parameters and gradients travel in; 0: each travels by itself."""

    bucket_bytes: int = 0
    """Of one collective of all parameters or gradients: those that may travel together are priced as parts of it until
    an outcome says which do; 0: each travels by itself. See `costs.travelling`."""

    reduces_each: bool = False
    """Whether each micro-batch's gradients of sharded parameters are scattered, for which whole sums have no room."""

    hidden_share: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """Of each operation along each axis, the share of its calls that run behind the products beside them; `AGAIN`
    stands for gathers that backward repeats."""

    again_axes: frozenset[int] = frozenset()
    """The axes along which a rank keeps its own part of an activation that it gathers, and gathers it again to compute
    with it later; our programs keep what they gathered."""

    sent_share: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """Of each operation along each axis, the share of its bytes that other software than ours sends; missing: all."""

    whole_axis: int = -1
    """The axis along which sums are made whole on every rank, never scattered; -1: none.

    Tensor parallelism without sequence parallelism, as frameworks have it, knows no other collective.
    """

    packs: bool = True
    """Whether blocks inside rows are copied, as in our programs: others lay out tensors so that none are."""

    two_level: bool = False
    """Whether a collective may run level by level, where that is faster; see `cost_models.two_level`."""

    formed_like: Links | None = None
    """Prices by which it was decided how each collective runs; None: by these."""

    _hops: tuple[tuple[Hop, ...], ...] = field(init=False)
    _known: dict[Message, Price] = field(init=False, default_factory=dict)
    _local: dict[int, float] = field(init=False, default_factory=dict)
    _routes: dict[tuple[object, ...], Routes] = field(init=False, default_factory=dict)
    _ways: dict[tuple[TensorMeta, tuple[str, ...], Order], dict[tuple[Layout, Layout], Way]] = field(
        init=False, default_factory=dict
    )
    _steps: dict[tuple[TensorMeta, bool], dict[tuple[Step, Order], _Taken]] = field(init=False, default_factory=dict)
    """Ways to many layouts have most of their steps in common."""

    _overlap: tuple[float, ...] = field(init=False)
    _blocking_s: tuple[float, ...] = field(init=False)
    """Of each axis, the seconds of a call that its issuer spends itself; a GPU's host runs ahead of the device."""

    kept_axis: int = -1
    """The axis along which parameters are never gathered, nor their gradients scattered; -1: none. Who splits a product
    computes with the parts, and gets those of its gradient."""

    @property
    def sums_whole(self) -> bool:
        """Return whether gradients of all micro-batches are summed in flat buffers before they are reduced."""
        return bool(self.flat_bytes) and not self.reduces_each

    def __post_init__(self) -> None:
        levels, ranks = self.cluster.levels, self.sizes[self.time_axes :]
        self._hops = ((),) * self.time_axes + tuple(axis_hops(levels, ranks, axis) for axis in range(len(ranks)))
        topology = {level.name: level.topology for level in levels}
        device = self.cluster.device
        self._overlap = tuple(
            overlap_efficiency(device, hops, topology.get(self.level(axis), "")) for axis, hops in enumerate(self._hops)
        )
        self._blocking_s = tuple(
            max((hop.call_s for hop in hops), default=0.0) if device.kind == "cpu" else 0.0 for hops in self._hops
        )

    def level(self, axis: int) -> str:
        """Return the name of the outermost link level that `axis` crosses."""
        return self._hops[axis][-1].level if self._hops[axis] else "device"

    def message_s(self, message: Message) -> float:
        """Return the seconds of one collective, with the copies before and behind it."""
        if message.axis < self.time_axes:
            return 0.0
        whole = self.travelling(message)
        if whole is not message:
            return self.message_s(whole) * message.bytes / whole.bytes + self.packing_s(message)
        return self._price_of(message).seconds + self.packing_s(message)

    def smooth_s(self, message: Message) -> float:
        """Return the seconds of one collective in its fastest form, and what of them computation gives for it.

        Unlike those of the form that it runs in, they have no jumps where it grows.
        """
        return self._price_of(message).least_s * (1.0 + self.shown_s(message) / self.message_s(message))

    def packing_s(self, message: Message) -> float:
        """Return the seconds of the copies before and behind a collective, in which its device does nothing else."""
        return self._copy_s(message.packed_bytes) if message.packed_bytes else 0.0

    def form(self, message: Message) -> tuple[int, int]:
        """Return how many ranks share the inner level of a collective that runs in two, and its chunks; 1, 1: flat."""
        if message.axis < self.time_axes or message.flat:
            return 1, 1
        price = self._price_of(message)
        return price.inner, price.chunks

    def _price_of(self, message: Message) -> Price:
        if message not in self._known:
            flat, *others = self.forms(message)
            if self.formed_like is not None:
                form = self.formed_like.form(message)
                best = next((each for each in others if (each.inner, each.chunks) == form), flat)
            else:
                best = min(others, key=lambda each: each.seconds, default=flat)
                best = best if best.seconds < _SURE * flat.seconds else flat
            least_s = min(each.seconds for each in (flat, *others))
            self._known[message] = replace(best, least_s=least_s)
        return self._known[message]

    def on(self, cluster: ClusterSpec) -> Links:
        """Return the prices on another cluster of the same shape; collectives run in the forms that these have."""
        return self if cluster is self.cluster else replace(self, cluster=cluster, formed_like=self)

    def forms(self, message: Message) -> Iterator[Price]:
        """Yield the price of one flat collective, then of each way to run it in two levels."""
        hops = self._hops[message.axis]
        if message.op == "all_reduce" and message.axis == self.across_axis:
            message = replace(message, bytes=message.bytes // self.sizes[self.sharded[0]])
        sent = message.bytes * self.sent_share.get((message.axis, message.op), 1.0)
        spent = float(collective_s(message.op, sent, hops))
        if message.op == "all_reduce" and message.axis == self.sharded[0]:
            spent = collective_s("reduce_scatter", message.bytes, hops)
            spent += 0.0 if self.gathers_ahead else self._renewal_s(message)
        kind = AGAIN if message.again else message.op
        spent *= 1.0 - self.hidden_share.get((message.axis, kind), 0.0) * self._overlap[message.axis]
        yield Price(spent, host_s(message.op, message.bytes, hops))
        for inside in splits(message.op, hops) if self.two_level else ():
            parts = pieces(message.op, message.bytes, hops, inside)
            sent_s = sum(host_s(each.op, each.full_bytes, each.hops) for each in parts)
            for chunks in self._chunks(message.op):
                spent = two_level_s(message.op, message.bytes, hops, inside, chunks)
                yield Price(spent, sent_s, ranks_inside(hops, inside), chunks)

    def renewal_s(self, message: Message) -> float:
        """Return the seconds to gather what a sharded optimizer makes of the gradients that a message reduces.

        0 where that is part of the message: `gathers_ahead` says which.
        """
        return self._renewed_s(message) if self.gathers_ahead else 0.0

    def renewed_within_s(self, message: Message) -> float:
        """Return the seconds of such gathers that are part of a message."""
        return 0.0 if self.gathers_ahead else self._renewed_s(message)

    def _renewed_s(self, message: Message) -> float:
        if message.op != "all_reduce" or message.axis != self.sharded[0]:
            return 0.0
        whole = self.travelling(message)
        return self._renewal_s(whole) * message.bytes / whole.bytes

    def _renewal_s(self, message: Message) -> float:
        return float(collective_s("all_gather", self.sharded[1] * message.bytes, self._hops[message.axis]))

    def travelling(self, message: Message) -> Message:
        """Return the message that one is part of: the flat buffer, where it is flattened."""
        together = message.op == "all_reduce" or not self.time_axes  # as `costs.buckets` has it
        size = self.flat_bytes or self.bucket_bytes * together
        return Message(message.op, message.axis, size) if message.flat and message.bytes < size else message

    def _chunks(self, op: str) -> tuple[int, ...]:
        """Return into how many chunks a collective in two levels can be cut: only where a host's thread runs it."""
        return _CHUNKS if op == "all_reduce" and self.cluster.device.kind == "cpu" else (1,)

    def step_s(self, step: Step, meta: TensorMeta, *, flat: bool = False, order: Order = ()) -> float:
        """Return the seconds of one reshard step, with the copies it makes beside the wire."""
        if step.kind == "slice":
            return self._copy_s(math.prod(local_shape(meta.shape, step.after, self.sizes)) * meta.item_bytes)
        if step.kind == "mask":
            return self._copy_s(step.message_numel(meta.shape, self.sizes) * meta.item_bytes)
        return self.message_s(self._message(step, meta, flat=flat, order=order))

    def blocking_s(self, axis: int) -> float:
        """Return the seconds of each call along an axis that its issuer spends itself: on a CPU, none on a GPU."""
        return self._blocking_s[axis]

    def hidable_s(self, message: Message) -> float:
        """Return the seconds of a collective that computation can run behind.

        Not the copies before and behind it, nor what issuing it takes on a CPU. Of the rest, all but what the computing
        core spends on its bytes, where the cluster says how much that is; else the share that `cost_models.overlap` has
        measured.
        """
        if message.axis < self.time_axes:
            return 0.0
        whole = self.travelling(message)
        if whole is not message:
            return self.hidable_s(whole) * message.bytes / whole.bytes
        rest = self.message_s(message) - self._blocking_s[message.axis] - self.packing_s(message)
        hops = self._hops[message.axis]
        if all(hop.host_bytes_per_s for hop in hops):
            return max(0.0, rest - self._price_of(message).host_s)
        return self.overlap(message.axis) * max(0.0, rest)

    def shown_s(self, message: Message) -> float:
        """Return the seconds of a collective that computation gives for it, whatever it runs beside."""
        return self.message_s(message) - self.hidable_s(message)

    def overlap(self, axis: int) -> float:
        """Return the share of a collective along an axis that computation can run behind: `cost_models.overlap`."""
        return self._overlap[axis]

    def routes(
        self,
        sources: tuple[Layout, ...],
        wanted: tuple[Layout, ...],
        meta: TensorMeta,
        *,
        travels: tuple[str, ...] = (),
        order: Order = (),
    ) -> Routes:
        """Return the ways from each of `sources` to each of `wanted`, priced, of a value whose memory is in `order`.

        A way that is one collective, one of those that `travels` names, is priced as part of a larger one.
        """
        key = (sources, wanted, meta, travels, order)
        if (found := self._routes.get(key)) is None:
            ways = self._ways.setdefault((meta, travels, order), {})

            def way(before: Layout, after: Layout) -> Way:
                """Return how to bring a tensor from one layout to another that differs, priced."""
                if (known := ways.get((before, after))) is None:
                    known = ways[before, after] = self._priced(before, after, meta, travels, order)
                return known

            found = self._routes[key] = Routes.of(sources, wanted, way)
        return found

    def _priced(self, before: Layout, after: Layout, meta: TensorMeta, travels: tuple[str, ...], order: Order) -> Way:
        nowhere = Way((), UNREACHABLE, UNREACHABLE, 0)
        if not is_reachable(before, after):
            return nowhere
        try:
            steps = route(before, after, meta.shape, self.sizes, self.time_axes)
        except NoRouteError:
            return nowhere
        if any(step.kind == "reduce_scatter" and step.axis == self.whole_axis for step in steps):
            return nowhere
        moving = [step.kind for step in steps if step.communicates and step.axis >= self.time_axes]
        flat = bool(travels) and (bool(self.flat_bytes) or (len(moving) == 1 and moving[0] in travels))
        taken = hidable_s = 0.0
        gathering_bytes, known = 0, self._steps.setdefault((meta, flat), {})
        for step in steps:
            if (price := known.get((step, order))) is None:
                price = known[step, order] = self._taken(step, meta, flat, order)
            taken += price.seconds
            hidable_s += price.hidable_s
            gathering_bytes = max(gathering_bytes, price.gathering_bytes)
            order = price.order
        return Way(steps, taken, hidable_s, gathering_bytes)

    def _taken(self, step: Step, meta: TensorMeta, flat: bool, order: Order) -> _Taken:
        behind = order_behind(step, self.sizes, order)
        if not step.communicates:
            return _Taken(self.step_s(step, meta), 0.0, 0, behind)
        packed = packing(step, meta.shape, self.sizes, order)
        message = self._message_of(step, meta, packed, flat=flat)
        # Blocks arrive one behind the other: where they belong elsewhere, the whole is copied once more.
        apart_bytes = message.bytes if step.kind == "all_gather" and packed.apart else 0
        return _Taken(self.message_s(message), self.hidable_s(message), apart_bytes, behind)

    def _message(self, step: Step, meta: TensorMeta, *, flat: bool, order: Order) -> Message:
        return self._message_of(step, meta, packing(step, meta.shape, self.sizes, order), flat=flat)

    def _message_of(self, step: Step, meta: TensorMeta, packed: Packing, *, flat: bool) -> Message:
        copied_bytes = packed.numel * self.packs * meta.item_bytes
        return Message(step.kind, step.axis, packed.moved * meta.item_bytes, flat, copied_bytes)

    def route_messages(
        self, before: Layout, after: Layout, meta: TensorMeta, *, flat: bool = False, order: Order = ()
    ) -> tuple[Message, ...]:
        """Return the collectives on the way from one layout to another, in order."""
        found = []
        for step in route(before, after, meta.shape, self.sizes, self.time_axes):
            if step.communicates and step.axis >= self.time_axes:
                found.append(self._message(step, meta, flat=flat, order=order))
            order = order_behind(step, self.sizes, order)
        return tuple(found)

    def messages_again(self, before: Layout, after: Layout, meta: TensorMeta, order: Order = ()) -> tuple[Message, ...]:
        """Return the gathers, on the way from one layout to another, that whoever reads the value later repeats."""
        if not self.again_axes or not is_reachable(before, after):
            return ()
        try:
            found = self.route_messages(before, after, meta, order=order)
        except NoRouteError:
            return ()
        return tuple(
            replace(each, again=True) for each in found if each.op == "all_gather" and each.axis in self.again_axes
        )

    def inner_messages(self, op: Op, metas: Sequence[TensorMeta], strategy: MeshStrategy) -> tuple[Message, ...]:
        """Return the collectives that the strategy's lowerings issue inside the operator."""
        return tuple(
            Message(inner.op, axis, inner_bytes(inner, op, metas, strategy, self.sizes))
            for axis, each in enumerate(strategy.axes)
            if axis >= self.time_axes
            for inner in each.inner
        )

    def inner_s(self, op: Op, metas: Sequence[TensorMeta], strategy: MeshStrategy) -> float:
        """Return the seconds of the collectives inside the operator."""
        return sum(self.message_s(message) for message in self.inner_messages(op, metas, strategy))

    def _copy_s(self, nbytes: int) -> float:
        if nbytes not in self._local:
            self._local[nbytes] = float(compute.memory_bound_s(2.0 * nbytes, self.cluster.device))
        return self._local[nbytes]


def inner_bytes(
    inner: Inner, op: Op, metas: Sequence[TensorMeta], strategy: MeshStrategy, sizes: tuple[int, ...]
) -> int:
    """Return the bytes of the message of a lowering's own collective."""
    meta = op.outputs[inner.output] if inner.input is None else metas[inner.input]
    layout = strategy.outputs[inner.output] if inner.input is None else strategy.inputs[inner.input]
    if meta is None or layout is None:
        raise ValueError(f"inner collective of {op.name} names a value that is no tensor")
    local = local_shape(meta.shape, layout, sizes)
    kept = (size for dim, size in enumerate(local) if dim not in inner.without)
    return inner.times * math.prod(kept) * TensorMeta((), inner.dtype).item_bytes
