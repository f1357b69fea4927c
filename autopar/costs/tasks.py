"""A solved program as tasks on streams: its operators and collectives, instance by instance, in the rewriter's order.

Gathers stand where they are first read; reductions and exchanges right behind what they reduce; what travels together
behind the last of it. A collective that the search priced as hidden takes its unhidden share (on CPUs also the host's
own part of each call) from the stream of computations when it is issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.costs.buckets import together
from autopar.costs.issued import Copy, Issued
from autopar.costs.liveness import local_bytes
from autopar.costs.moves import copy_read, roots_of
from autopar.costs.outcome import Outcome
from autopar.ir.graph import Op, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.roles import base_of, gradient_values
from autopar.ir.tasks import Task, collective_name

_Place = tuple[int, int, int]
"""Where a task stands: operator's number; before it, itself or behind it; and what comes first there."""

_BEFORE, _AT, _BEHIND = range(3)


def tasks_of(outcome: Outcome, mesh: Mesh) -> tuple[Task, ...]:
    """Return the step of a program without micro-batches, in an order in which it can run."""
    builder = _Builder(outcome, mesh)
    builder.build()
    return builder.ordered()


@dataclass
class _Builder:
    outcome: Outcome
    mesh: Mesh

    _made: list[tuple[_Place, Task]] = field(init=False, default_factory=list)
    _values: dict[tuple[str, int], int] = field(init=False, default_factory=dict)
    """Task that makes a value; parameters and inputs are there already and have none."""

    _copies: dict[Copy, int] = field(init=False, default_factory=dict)
    _seconds: dict[str, float] = field(init=False, default_factory=dict)

    def build(self) -> None:
        """Make the tasks of all operators and collectives."""
        graph = self.outcome.graph
        self._number = {op.name: i for i, op in enumerate(graph.ops)}
        self._kept = {(o.ref.op, o.ref.index) for o in graph.outputs if o.ref is not None}
        self._roots, self._base = roots_of(graph), base_of(graph)
        self._runs = {each: run for run in self.outcome.runs for each in run}
        self._ends = gradient_values(graph)
        self._moved = {each.copy for each in self.outcome.messages() if each.copy is not None}
        self._late: set[str] = set()
        needed: dict[str, list[Issued]] = {}
        last: list[Issued] = []
        for each in self.outcome.messages():
            if each.source is not None and each.source.op == each.at:
                last.append(each)
            else:
                needed.setdefault(each.at, []).append(each)
        for op in graph.ops:
            if op.kind == "call":
                if self._comes_last(op):
                    self._late.add(op.name)
                self._operator(op, needed.get(op.name, ()))
        for each in last:
            self._step(each, len(graph.ops))

    def ordered(self) -> tuple[Task, ...]:
        """Return the tasks in order, those that they read renumbered."""
        order = sorted(range(len(self._made)), key=lambda i: self._made[i][0])
        place = {index: at for at, index in enumerate(order)}
        found = []
        for index in order:
            task = self._made[index][1]
            memory = None if task.memory_of is None else place[task.memory_of]
            found.append(replace(task, reads=tuple(sorted({place[each] for each in task.reads})), memory_of=memory))
        return tuple(found)

    def _add(self, number: int, side: int, task: Task) -> int:
        self._made.append(((number, side, len(self._made)), task))
        return len(self._made) - 1

    def _operator(self, op: Op, needed: Sequence[Issued]) -> None:
        graph, outcome = self.outcome.graph, self.outcome
        rep = graph.representative(op.name)
        number = self._number[op.name] if not self._comes_last(op) else len(graph.ops)
        inner: list[int] = []
        for each in needed:
            if each.copy is None:
                reads = [self._values[ref.op, ref.index] for ref in op.refs if (ref.op, ref.index) in self._values]
                inner.append(
                    self._add(number, _BEFORE, self._collective(each, (*reads, *inner), kind=outcome.place(each)))
                )
            else:
                self._step(each, number)
        reads = inner
        for ref, need in zip(op.refs, outcome.strategy(rep).inputs, strict=True):
            copy = copy_read(outcome, self._roots, op, ref, need)
            found = self._values.get((ref.op, ref.index)) if copy is None else self._copies.get(copy)
            found = self._values.get((ref.op, ref.index)) if found is None else found
            if found is not None:
                reads.append(found)
        if rep not in self._seconds:
            self._seconds[rep] = outcome.seconds(rep)
        made = self._bytes(op)
        views = self._base[op.name, 0] != (op.name, 0) if op.outputs else False
        task = Task(
            name=op.name,
            seconds=self._seconds[rep],
            phase=op.phase,
            reads=tuple(reads),
            makes_bytes=0 if views else made,
            memory_of=reads[0] if views and reads else None,
            kept=any((op.name, i) in self._kept for i in range(len(op.outputs))),
            module=op.module,
        )
        index = self._add(number, _AT, task)
        for output in range(len(op.outputs)):
            self._values[op.name, output] = index

    def _comes_last(self, op: Op) -> bool:
        """Return whether an operator only casts or views a reduced gradient: it runs when that is waited for."""
        if Ref(op.name) not in self._ends or len(op.refs) != 1:
            return False
        (ref,) = op.refs
        if ref not in self._ends:
            return False  # it makes a gradient, be it of what was gathered
        moved = (ref.op, ref.index, self.outcome.strategy(self.outcome.graph.representative(op.name)).inputs[0], "")
        return moved in self._moved or ref.op in self._late

    def _bytes(self, op: Op) -> int:
        layouts = self.outcome.strategy(self.outcome.graph.representative(op.name)).outputs
        sizes = self.outcome.links.sizes
        return round(sum(local_bytes(m, at, sizes) for m, at in zip(op.outputs, layouts, strict=True) if m is not None))

    def _step(self, issued: Issued, number: int) -> None:
        """Add one step of a route: behind what it reads if it reduces or exchanges, else where it is first read."""
        if issued in self._runs:
            self._with_its_run(issued, number)
            return
        copy, base, first = self._base_of(issued)
        early = first and issued.message.op != "all_gather" and base is not None
        source = issued.source.op if issued.source is not None else issued.at
        same_phase = self.outcome.graph.by_name[source].phase == issued.phase
        place = (self._number[source], _BEHIND) if early and same_phase else (number, _BEFORE)
        kept = issued.source is not None and issued.at == source
        self._copies[copy] = self._add(*place, self._alone(issued, base, kept=kept))

    def _base_of(self, issued: Issued) -> tuple[Copy, int | None, bool]:
        """Return the copy that a step leads to, the task that makes what it reads, and whether it is the first step."""
        copy, source = issued.copy, issued.source
        if copy is None or source is None:
            raise ValueError(f"{issued.tensor} is moved nowhere")
        first = copy not in self._copies
        return copy, self._values.get((source.op, source.index)) if first else self._copies[copy], first

    def _with_its_run(self, issued: Issued, number: int) -> None:
        """Add a run of collectives: gathers where the first of them is read, reductions behind the last of them."""
        run = self._runs[issued]
        gathers = issued.message.op == "all_gather"
        if issued is not (run[0] if gathers else run[-1]):
            return
        message = together(run)
        found = [self._base_of(each) for each in run]
        sources = [self._number[each.source.op] for each in run if each.source is not None]
        place = (number, _BEFORE) if gathers else (max(sources), _BEHIND)
        merged = replace(issued, message=message, tensor=str(self.outcome.bucket(run, self.mesh)))
        reads = tuple(base for _, base, _ in found if base is not None)
        task = self._collective(merged, reads, kind=self.outcome.place(issued), kept=not gathers)
        # Sums are made in place; what copying them into one piece takes is in the outcome's memory.
        task = replace(task, makes_bytes=0) if message.op == "all_reduce" else task
        index = self._add(*place, task)
        self._copies.update(dict.fromkeys((copy for copy, _, _ in found), index))

    def _alone(self, issued: Issued, base: int | None, *, kept: bool) -> Task:
        task = self._collective(issued, () if base is None else (base,), kind=self.outcome.place(issued), kept=kept)
        # A sum of what nobody else reads is made in place; where somebody does, this counts too little by one copy.
        in_place = issued.message.op == "all_reduce" and base is not None
        return replace(task, makes_bytes=0, memory_of=base) if in_place else task

    def _collective(self, issued: Issued, reads: tuple[int, ...], *, kind: int, kept: bool = False) -> Task:
        links, message = self.outcome.links, issued.message
        taken = links.message_s(message)
        alone = max(0.0, taken - links.blocking_s(message.axis) - links.packing_s(message))
        hidden = links.hidable_s(message) if issued.overlapped else alone
        axis = self.outcome.axis(self.mesh, message.axis)
        gathered = issued.source is not None and message.op == "all_gather"
        size = links.sizes[message.axis]
        return Task(
            name=collective_name(message.op, issued.tensor, axis, issued.phase),
            seconds=alone,
            issue_s=taken - hidden,
            within_s=alone - hidden,
            stream=axis,
            link=links.level(message.axis),
            phase=issued.phase,
            reads=reads,
            makes_bytes=message.bytes // size if message.op == "reduce_scatter" else message.bytes,
            kept=kept,
            gathers=issued.tensor if gathered and issued.source is not None and issued.source.op in self._roots else "",
            reduces=issued.finishes,
            kind=kind,
        )
