"""A solved table to decisions and predictions: what the plan file says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from autopar.costs import operators
from autopar.costs.buckets import Clock, runs_of, together
from autopar.costs.held import held_curve, held_memory, merging_bytes, needed_until
from autopar.costs.issued import Issued, is_shared
from autopar.costs.issuing import issued
from autopar.costs.links import Links, Message
from autopar.costs.liveness import gradient_indices
from autopar.costs.moves import roots_of
from autopar.costs.surroundings import surroundings
from autopar.costs.table import Pricing
from autopar.costs.timing import Beyond, Timing, timing
from autopar.costs.travelling import beyond, travelling
from autopar.ir.graph import Graph, Op
from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import parted, within
from autopar.ir.placement import Layout, Placement, Shard
from autopar.ir.plan import (
    Breakdown,
    Bucket,
    Collective,
    Decisions,
    Estimates,
    Gather,
    Memory,
    OperatorDecision,
    ParameterDecision,
    Reduce,
    Schedule,
    Stage,
)
from autopar.ir.strategy import MeshStrategy
from autopar.ir.table import Floats


@dataclass(frozen=True, slots=True)
class Pairing:
    """What running two micro-batches at once changes of a step."""

    seconds: Beyond
    """Of a step, beyond one micro-batch after another."""

    more_bytes: int
    """Held at the peak on top of what one holds."""


@dataclass(frozen=True)
class Outcome:
    """One assignment of one priced program."""

    graph: Graph
    pricing: Pricing
    links: Links
    options: tuple[int, ...]
    optimizer: str
    merges: bool = True
    """Whether collectives may travel together."""

    spare_bytes: int = 0
    """What may be held on top of what the search counted, to gather parameters together or ahead of their use."""

    keep_outputs: bool | None = None
    """Whether outputs beside the loss are kept over micro-batches; `None`: if they fit."""

    pairing: Pairing | None = None
    """What two micro-batches at once change; `None`: they run one after another."""

    def merging(self, *, spare_bytes: int = 0, merges: bool = True) -> Outcome:
        """Return this outcome with another room for what travels together; what does not depend on that is known."""
        return self._remembering(replace(self, merges=merges, spare_bytes=spare_bytes))

    def in_pairs(self, pairing: Pairing) -> Outcome:
        """Return this outcome with two micro-batches at once; what does not depend on that is known."""
        return self._remembering(replace(self, pairing=pairing))

    def _remembering(self, made: Outcome) -> Outcome:
        """Return an outcome of the same layouts, which knows what is known of this one and the same for it."""
        made.__dict__.update({name: self.__dict__[name] for name in _OF_ALL_ROOMS if name in self.__dict__})
        return made

    @property
    def microbatches(self) -> int:
        """Return how many micro-batches a step has."""
        return prod(self.links.sizes[: self.links.time_axes])

    def strategy(self, rep: str) -> MeshStrategy:
        """Return the strategy of a representative operator, along time too where there are micro-batches."""
        return self._strategies[rep]

    @cached_property
    def _strategies(self) -> dict[str, MeshStrategy]:
        clusters, options = self.pricing.clusters, self.options
        return {rep: clusters[node].strategy(rep, options[node]) for rep, node in self.pricing.home.items()}

    def seconds(self, rep: str) -> float:
        """Return the seconds of one instance of a representative operator in one micro-batch, collectives left out."""
        return self._seconds[rep]

    @cached_property
    def _seconds(self) -> dict[str, float]:
        return {op.name: self._operator(op, 1).predicted_s for op in self.graph.representatives}

    @cached_property
    def issued_operators(self) -> int:
        """Return how many operators the host issues in a step."""
        return self.microbatches * operators.issued_operators(self.graph)

    def layout(self, rep: str, index: int = 0) -> Layout:
        """Return the layout that a value is made in."""
        found = self.strategy(rep).outputs[index]
        if found is None:
            raise ValueError(f"output {index} of {rep} is no tensor")
        return found

    def keeps_gather(self, rep: str) -> bool:
        """Return whether a parameter's gathered copies are kept from forward to backward."""
        node = self.pricing.home[rep]
        cluster = self.pricing.clusters[node]
        return bool(cluster.once) and cluster.once[self.options[node]]

    def reduces_early(self, rep: str) -> bool:
        """Return whether each micro-batch's gradient of a parameter is brought to its place, not only their sum."""
        node = self.pricing.home[rep]
        cluster = self.pricing.clusters[node]
        return bool(cluster.early) and cluster.early[self.options[node]]

    def output_layout(self, name: str) -> Layout:
        """Return the layout of a user-visible output."""
        node = self.pricing.sinks[name]
        if name in self.pricing.sink_layouts:
            return self.pricing.sink_layouts[name][self.options[node]]
        return self.layout(self.pricing.clusters[node].members[0])

    def decisions(self, mesh: Mesh, degrees: Mapping[str, int]) -> Decisions:
        """Return all that the rewriter and the runtime read."""
        graph = self.graph
        found = {op.name: self._operator(op, len(graph.instances[op.name])) for op in graph.representatives}
        parameters = dict(sorted(self._parameters()))
        outputs = {o.name: self.output_layout(o.name) for o in graph.outputs if o.kind == "output" and o.ref}
        in_time: dict[str, Placement] = {}
        if self.microbatches > 1:
            made = {o.name: self.layout(graph.representative(o.ref.op), o.ref.index) for o in graph.outputs if o.ref}
            in_time = {name: made[name][0] for name in outputs}
            outputs = {name: parted(layout, self.microbatches)[1] for name, layout in outputs.items()}
        return Decisions(
            degrees=dict(degrees),
            mesh=mesh,
            parameters=parameters,
            operators=found,
            outputs=outputs,
            outputs_in_time=in_time,
            collectives=self.collectives(mesh),
            buckets=tuple(self.bucket(run, mesh) for run in self.runs),
            schedule=Schedule(num_microbatches=self.microbatches, batch_overlap=1 if self.pairing is None else 2),
            stages=(Stage(index=0, ranks=tuple(range(mesh.world_size)), blocks=(), parameters=tuple(parameters)),),
        )

    def _operator(self, op: Op, instances: int) -> OperatorDecision:
        graph, strategy = self.graph, self.strategy(op.name)
        metas = tuple(graph.meta(ref) for ref in op.refs)
        device, sizes = self.links.cluster.device, self.links.sizes
        spent = operators.seconds(op, metas, [strategy], sizes, device, surroundings(graph, op))
        if self.microbatches > 1 and self.links.sums_whole:
            spent = spent + operators.accumulation_seconds(op, gradient_indices(graph, op), [strategy], sizes, device)
        time = None
        if self.microbatches > 1:
            time, strategy = within(strategy, self.microbatches)
        return OperatorDecision(
            target=op.target,
            strategy=strategy,
            time=time,
            inputs=tuple(f"{ref.op}:{ref.index}" if ref.index else ref.op for ref in op.refs),
            output=op.outputs[0] if op.outputs else None,
            phase=op.phase,
            module=op.module,
            source=op.source,
            instances=instances,
            predicted_s=float(spent[0]),
        )

    def _parameters(self) -> Iterator[tuple[str, ParameterDecision]]:
        gathered = self._gathered()
        for op in self.graph.ops:
            if op.kind not in {"parameter", "buffer"}:
                continue
            rep = self.graph.representative(op.name)
            layout = self.layout(rep)
            gather: Gather = "none"
            if self.microbatches > 1:
                _, layout = parted(layout, self.microbatches)
            if any(isinstance(p, Shard) for p in layout) and rep in gathered:
                gather = "once" if self.keeps_gather(rep) else "per_phase"
            reduce: Reduce = "microbatch" if self.reduces_early(rep) else "step"
            for name in self.graph.aliases.get(op.target, (op.target,)):
                yield name, ParameterDecision(placements=layout, gather=gather, reduce=reduce)

    @property
    def gathers(self) -> bool:
        """Return whether some parameter is made whole for use."""
        return bool(self._gathered())

    def _gathered(self) -> frozenset[str]:
        """Return the representatives of the parameters that are made whole for use, viewed and cast or not."""
        roots = roots_of(self.graph)
        return frozenset(roots[m.tensor_rep] for m in self.messages() if m.tensor_rep in roots)

    def messages(self) -> tuple[Issued, ...]:
        """Return every collective of one step, instance by instance, as the rewriter will issue them."""
        return self._messages

    @cached_property
    def _messages(self) -> tuple[Issued, ...]:
        return tuple(issued(self))

    def collectives(self, mesh: Mesh) -> tuple[Collective, ...]:
        """Return the collectives of one step, equal ones counted together, in program order; merged ones last."""
        by_name = self.graph.by_name
        often = {_kind(each): self._times(each) for each in self.messages()}
        alone = tuple(
            Collective(
                op=message.op,
                axis=self.axis(mesh, message.axis),
                level=self.links.level(message.axis),
                bytes=message.bytes,
                count=count * often[kind],
                phase=phase,
                tensor=_label(by_name[rep]),
                overlapped=overlapped,
                predicted_s=count * often[kind] * self.links.message_s(message),
                stream=self.axis(mesh, message.axis),
                inner=self.links.form(message)[0],
                chunks=self.links.form(message)[1],
            )
            for kind, count in self._alone.items()
            for message, phase, rep, overlapped, _ in (kind,)
        )
        return alone + tuple(self._merged(run, mesh) for run in self.runs)

    def _times(self, issued: Issued) -> int:
        """Return how often a collective runs in a step, once for two micro-batches where it serves both."""
        both = self.pairing is not None and issued.times > 1 and is_shared(self.graph, issued)
        return issued.times // 2 if both else issued.times

    @cached_property
    def _alone(self) -> Counter[tuple[Message, str, str, bool, int]]:
        """Return how many equal collectives there are of each kind, those that travel together left out."""
        return Counter(_kind(each) for each in self.messages() if each not in self.run_of)

    def place(self, issued: Issued) -> int:
        """Return the place of a collective's kind, or of those it travels with, among `collectives`."""
        if issued in self.run_of:
            return len(self._alone) + self.run_of[issued]
        return self._places[_kind(issued)]

    @cached_property
    def run_of(self) -> dict[Issued, int]:
        """Return, of each collective that travels with others, the place of its run among `runs`."""
        return {each: number for number, run in enumerate(self.runs) for each in run}

    @cached_property
    def _places(self) -> dict[tuple[Message, str, str, bool, int], int]:
        return {kind: place for place, kind in enumerate(self._alone)}

    def axis(self, mesh: Mesh, axis: int) -> str:
        """Return the name of an axis of the priced mesh, which has time first."""
        return mesh.axes[axis - self.links.time_axes].name

    def bucket(self, run: Sequence[Issued], mesh: Mesh) -> Bucket:
        """Return the decision that collectives travel together."""
        first = run[0]
        axis = self.axis(mesh, first.message.axis)
        names = tuple(each.tensor for each in run)
        return Bucket(op=first.message.op, axis=axis, phase=first.phase, tensors=names)

    def _merged(self, run: Sequence[Issued], mesh: Mesh) -> Collective:
        message = together(run)
        bucket = self.bucket(run, mesh)
        return Collective(
            op=message.op,
            axis=bucket.axis,
            level=self.links.level(message.axis),
            bytes=message.bytes,
            count=1,
            phase=bucket.phase,
            tensor=str(bucket),
            overlapped=run[0].overlapped,
            predicted_s=self.links.message_s(message),
            stream=bucket.axis,
            inner=self.links.form(message)[0],
            chunks=self.links.form(message)[1],
        )

    @cached_property
    def runs(self) -> tuple[tuple[Issued, ...], ...]:
        """Return the collectives that travel together; every other one goes by itself."""
        if not self.merges:
            return ()
        dtypes = {}
        for each in self.messages():
            if each.source is not None:
                dtypes[each.source] = self.graph.meta(each.source).dtype
        return runs_of(self.messages(), dtypes, self._clock(), self.links, self.spare_bytes)

    def _merging_bytes(self) -> Floats:
        """Return what travelling together adds to what is held at each position, less what it saves."""
        return merging_bytes(self.graph, self.runs, self.links, self.microbatches)

    def _clock(self) -> Clock:
        """Return when each operator begins and ends in its phase, computation alone."""
        begin: dict[str, float] = {}
        end: dict[str, float] = {}
        now = {"forward": 0.0, "backward": 0.0}
        for op in self.graph.ops:
            begin[op.name] = now[op.phase]
            now[op.phase] += self.seconds(self.graph.representative(op.name))
            end[op.name] = now[op.phase]
        return Clock(begin, end, now, self.microbatches)

    @cached_property
    def _timing(self) -> Timing:
        more = beyond(self)
        if self.pairing is not None:
            mine = self.pairing.seconds
            more = mine if more is None else Beyond(more.hidden_s + mine.hidden_s, more.shown_s + mine.shown_s)
        return timing(self.pricing.table, self.options, more)

    @property
    def step_s(self) -> float:
        """Return the seconds of a step: of the device, or of the host that drives it."""
        device = self.links.cluster.device
        return device.with_host_s(self._shown_s, self.issued_operators) + self._timing.optimizer_s

    @property
    def _shown_s(self) -> float:
        """Return the seconds of forward and backward on a device that never waits for its host."""
        return self._timing.forward_s + self._timing.backward_s - self._hidden_at_ends_s

    @cached_property
    def _hidden_at_ends_s(self) -> float:
        """Return what is hidden of collectives that run once a step, which the search counts as exposed.

        The first micro-batch's forward hides gathers, but for the first; the last one's backward hides reductions of
        sums, but for the last. Less what shows of new parameters that are gathered behind forward.
        """
        links, renewed = self.links, self._renewal_s()
        if self.microbatches == 1:
            return -renewed
        own = not links.flat_bytes
        gathers = [each for each in self.messages() if own and each.times == 1 and not each.finishes]
        sums = [each for each in self.messages() if (own or links.hides_reductions) and each.finishes]
        return self._hidden_behind_s(gathers, "forward") + self._hidden_behind_s(sums, "backward") - renewed

    def _hidden_behind_s(self, once: Sequence[Issued], phase: str) -> float:
        if not once:
            return 0.0
        messages = travelling(self, once)
        alone = max(self.links.hidable_s(self.links.travelling(each)) for each in messages)
        return max(0.0, min(sum(map(self.links.hidable_s, messages)) - alone, self.phase_s(phase)))

    def _renewal_s(self) -> float:
        """Return what shows of the gathers of new parameters, which the next step's first forward hides."""
        ends = [each.message for each in self.messages() if each.overlapped or each.finishes]
        gathers = [(self.links.renewal_s(each), self.links.overlap(each.axis)) for each in ends]
        whole = sum(seconds for seconds, _ in gathers)
        hidable = sum(seconds * share for seconds, share in gathers)
        return whole - min(hidable, self.phase_s("forward")) if whole else 0.0

    def phase_s(self, phase: str) -> float:
        """Return the seconds that one micro-batch computes in a phase."""
        reps = Counter(self.graph.representative(op.name) for op in self.graph.ops if op.phase == phase)
        return sum(count * self.seconds(rep) for rep, count in reps.items())

    def estimates(self, budget_bytes: int, dtype: str, model_flops: float) -> Estimates:
        """Return what is predicted of a step.

        MFU is `model_flops`, those of the program with nothing recomputed, over the peak of the type named `dtype`.
        """
        step_s = self.step_s
        compute = self._compute_s()
        memory = self.memory()
        world = prod(self.links.sizes[self.links.time_axes :])
        peak = self.links.cluster.device.flops_for(dtype)
        return Estimates(
            step_time_s=step_s,
            mfu=model_flops / (step_s * world * peak) if step_s else 0.0,
            peak_memory_bytes=memory.total,
            memory=memory,
            memory_budget_bytes=budget_bytes,
            communication_bytes=sum(self._times(m) * m.message.bytes for m in self.messages()),
            breakdown=Breakdown(
                compute_s=compute,
                exposed_communication_s=max(0.0, self._shown_s - compute),
                bubble_s=0.0,
                optimizer_s=self._timing.optimizer_s,
                host_s=max(0.0, step_s - self._timing.optimizer_s - max(self._shown_s, compute)),
            ),
            sources={
                "step_time_s": "autopar.costs.timing: makespan of computation and overlapped collectives, per phase",
                "compute_s": f"cost_models.compute: roofline of {self.links.cluster.device.name}",
                "exposed_communication_s": "cost_models.collectives: alpha-beta per link level, less what overlaps",
                "peak_memory_bytes": "autopar.costs.liveness: bytes alive at the peak of the program's order",
            },
        )

    def _compute_s(self) -> float:
        """Return the seconds of all operators on one device, collectives left out."""
        return self.microbatches * sum(self.seconds(self.graph.representative(op.name)) for op in self.graph.ops)

    @cached_property
    def memory_curve(self) -> Floats:
        """Return the bytes held at each position of the program."""
        return np.asarray(self._held_bytes + self._merging_bytes(), dtype=np.float64)

    @cached_property
    def _held_bytes(self) -> Floats:
        """Return the bytes held at each position, were each collective to travel by itself."""
        return held_curve(self)

    @cached_property
    def needed_until(self) -> dict[tuple[str, int], int]:
        """Return until when values that are read in other layouts are held; see `held.needed_until`."""
        return needed_until(self)

    def memory(self) -> Memory:
        """Return the bytes held at the peak, by what they are."""
        one = held_memory(self)
        more = 0 if self.pairing is None else self.pairing.more_bytes
        return replace(one, activations=one.activations + more)


_OF_ALL_ROOMS = ("_messages", "_held_bytes", "needed_until")
"""What is remembered of an outcome and is the same however its collectives travel and its micro-batches run."""


def _kind(issued: Issued) -> tuple[Message, str, str, bool, int]:
    return issued.message, issued.phase, issued.tensor_rep, issued.overlapped, issued.times


def _label(op: Op) -> str:
    return op.target if op.kind in {"input", "tangent"} else op.moved
