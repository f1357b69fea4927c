"""The captured program on the local shapes of one rank, every tensor brought to the layout its reader needs.

One fx graph still, forward and backward together; `partition` cuts it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar._torch import LazyGraphModule
from autopar.ir.graph import Graph, Op, Output, Phase, Ref
from autopar.ir.placement import Layout, Partial, Replicate, Shard, is_own, local_shape
from autopar.ir.plan import Decisions
from autopar.ir.reshard import Step, route
from autopar.ir.tasks import block_of
from autopar.rewrite.derived import derived_parameters
from autopar.rewrite.drawn_once import drawn_once
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.expert_rows import ends_of_rows
from autopar.rewrite.inputs import split_inputs
from autopar.rewrite.marks import COLLECTIVES, WAIT, Mark, Role
from autopar.rewrite.operators import emit
from autopar.rewrite.site import Site
from autopar.rewrite.steps import Writer

Made = fx.Node | tuple[Any, ...]
_KEPT_META = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "val")


@dataclass
class Localiser:
    """Writes one rank's program.

    A value in another layout than its producer's is made once and shared by all that read it so,
    in forward and backward. A parameter (and what only views or casts one) is apart: unless its
    gather is kept ("once"), each phase makes its own copy, and none is saved in between.
    """

    joint: fx.GraphModule
    graph: Graph
    decisions: Decisions
    rank: int
    split: Collection[str] = ()
    """Mesh axes along which each rank brings its own part of the batch to a call, not the whole."""

    out: fx.Graph = field(init=False, default_factory=fx.Graph)

    def __post_init__(self) -> None:
        mesh = self.decisions.mesh
        self.writer = Writer(self.out, mesh, mesh.coordinate(self.rank))
        self.per_phase = derived_parameters(self.graph, self.decisions)
        self._split = split_inputs(self.graph, mesh, self.split) if self.split else {}
        self._once = drawn_once(self.graph, self.decisions)
        self._ends = ends_of_rows(self.graph, self.decisions)
        self._nodes = {node.name: node for node in self.joint.graph.nodes}
        self._made: dict[tuple[str, Phase | None], Made] = {}
        self._elements: dict[tuple[Ref, Phase | None], fx.Node] = {}
        self._copies: dict[tuple[Ref, Layout, Phase | None], fx.Node] = {}
        self._gathered: dict[str, bool] = {}

    def run(self) -> fx.GraphModule:
        """Return the local program: the joint graph's placeholders, and one flat tuple beside `graph.outputs`."""
        results: list[fx.Node | None] = []
        for node in self.joint.graph.nodes:
            if node.op == "output" or (node.op == "call_function" and node.target is operator.getitem):
                continue
            op = self.graph.by_name[node.name]
            if op.kind == "call" and op.phase == "backward" and not results:
                results = self._results()
            if op.kind == "call":
                self._made[op.name, None] = self._operator(op, op.phase)
            else:
                self._made[op.name, None] = self._start(node, op)
        results = results or self._results()
        gradients = (self._result(each) for each in self.graph.outputs if each.kind == "gradient")
        pairs = zip(self.graph.outputs, results, strict=True)
        self.out.output(tuple(next(gradients) if each.kind == "gradient" else made for each, made in pairs))
        return LazyGraphModule(self.joint, self.out)

    def layout(self, ref: Ref) -> Layout:
        """Return the layout in which a value is made."""
        op = self.graph.by_name[ref.op]
        if op.kind == "parameter":
            return self.decisions.parameters[op.target].placements
        if op.name in self._split:
            return self._split[op.name]
        found = self.decisions.operators[self.graph.representative(ref.op)].strategy.outputs[ref.index]
        if found is None:
            raise RewriteError(f"output {ref.index} of {op.where} has no layout")
        return found

    def _start(self, node: fx.Node, op: Op) -> fx.Node:
        made = self.out.create_node(node.op, node.target, name=node.name)
        made.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        made.meta["autopar"] = Mark(op.name, op.phase)
        meta = op.outputs[0]
        if meta is not None:
            made.meta["local_shape"] = local_shape(meta.shape, self.layout(Ref(op.name)), self.decisions.mesh.sizes)
        return made

    def _operator(self, op: Op, phase: Phase) -> Made:
        node = self._nodes[op.name]
        strategy = self.decisions.operators[self.graph.representative(op.name)].strategy
        layouts = iter(zip(op.refs, strategy.inputs, strict=True))
        args = fx.map_arg(node.args, lambda _: self._next(layouts, phase))
        kwargs = {name: fx.map_arg(node.kwargs[name], lambda _: self._next(layouts, phase)) for name, _ in op.kwargs}
        before = next(iter(reversed(self.out.nodes)), None)
        site = Site(
            graph=self.out,
            op=op,
            args=tuple(args),
            kwargs=kwargs,
            strategy=strategy,
            mesh=self.decisions.mesh,
            coordinate=self.writer.coordinate,
            metas=tuple(self.graph.meta(ref) for ref in op.refs),
            once=op.name in self._once,
        )
        made: Made = emit(site, node)
        self._describe(before, node, op, phase)
        for index, each in enumerate(made if isinstance(made, tuple) else (made,)):
            if isinstance(each, fx.Node) and isinstance(made, tuple | fx.Node) and not self._is_tuple(op, made):
                self._expect(each, op, index)
        return made

    def _is_tuple(self, op: Op, made: Made) -> bool:
        """Return whether `made` is one node that stands for several outputs."""
        return isinstance(made, fx.Node) and isinstance(self._nodes[op.name].meta.get("val"), tuple | list)

    def _expect(self, node: fx.Node, op: Op, index: int) -> None:
        meta = op.outputs[index]
        if meta is not None:
            layout = self.layout(Ref(op.name, index))
            node.meta["local_shape"] = local_shape(meta.shape, layout, self.decisions.mesh.sizes)

    def _next(self, layouts: Iterator[tuple[Ref, Layout]], phase: Phase) -> fx.Node:
        ref, layout = next(layouts)
        return self._demand(ref, layout, phase)

    def _describe(self, before: fx.Node | None, source: fx.Node, op: Op, phase: Phase) -> None:
        """Mark the nodes appended after `before`."""
        node = before.next if before is not None else next(iter(self.out.nodes))
        while node.op != "root":
            node.meta.update({key: source.meta[key] for key in _KEPT_META if key in source.meta and key != "val"})
            role: Role = "start" if node.target in COLLECTIVES else "wait" if node.target is WAIT else "operator"
            node.meta.setdefault("autopar", Mark(op.name, phase, role, op.moved))
            node.meta["block"] = f"{phase} {block_of(op.module) or op.name}"
            node = node.next

    def _demand(self, ref: Ref, layout: Layout, phase: Phase, *, gradient_of: str = "") -> fx.Node:
        """Return the node that holds a value in a layout, made now if it does not exist yet."""
        steps = self._route(ref, layout)
        apart = ref.op in self.per_phase and (any(s.communicates for s in steps) or self._is_gathered(ref.op))
        own_phase = phase if apart else None
        key = (ref, layout, own_phase)
        if key not in self._copies:
            value = self._value(ref, own_phase)
            moved = self._moves(ref, phase, gradient_of)
            for step in steps:
                known = self._known(ref, step, phase)
                value = self.writer.step(value, step, self.graph.meta(ref).shape, moved, known)
            self._copies[key] = value
        return self._copies[key]

    def _known(self, ref: Ref, step: Step, phase: Phase) -> fx.Node | None:
        """Return where the rows of each expert end on each rank, if a step brings rows there or back."""
        before = step.before[step.axis]
        if not isinstance(before, Shard) or not is_own(before):
            return None
        ends = self._ends[ref]
        made = self.layout(ends)
        there = (*made[: step.axis], Shard(0, rows="expert"), *made[step.axis + 1 :])
        return self._demand(ends, there, phase)

    def _route(self, ref: Ref, layout: Layout) -> tuple[Step, ...]:
        before = self.layout(ref)
        if before == layout:
            return ()
        mesh = self.decisions.mesh
        return route(before, layout, self.graph.meta(ref).shape, mesh.sizes, mesh.time_axes)

    def _moves(self, ref: Ref, phase: Phase, gradient_of: str) -> Mark:
        op = self.graph.by_name[ref.op]
        named = self.graph.by_name[gradient_of] if gradient_of else op
        return Mark(op.name, phase, "move", named.moved, op.name in self.per_phase, bool(gradient_of))

    def _value(self, ref: Ref, phase: Phase | None) -> fx.Node:
        """Return the node that makes a value, of the given phase where each phase has its own."""
        op = self.graph.by_name[ref.op]
        if phase == "backward" and op.phase == "forward" and self._is_gathered(op.name):
            if (op.name, phase) not in self._made:
                self._made[op.name, phase] = self._operator(op, phase)
        else:
            phase = None
        made = self._made[op.name, phase]
        if isinstance(made, tuple):
            return made[ref.index]  # type: ignore[no-any-return]
        if not self._is_tuple(op, made):
            return made
        if (ref, phase) not in self._elements:
            # Beside its operator, so that it exists in the phase in which the operator runs.
            with self.out.inserting_after(made):
                element = self.out.call_function(operator.getitem, (made, ref.index))
            element.meta["autopar"] = made.meta["autopar"]
            self._expect(element, op, ref.index)
            self._elements[ref, phase] = element
        return self._elements[ref, phase]

    def _is_gathered(self, name: str) -> bool:
        """Return whether a view or cast of a parameter reads it through communication."""
        op = self.graph.by_name[name]
        if op.kind != "call":
            return False
        if name not in self._gathered:
            strategy = self.decisions.operators[self.graph.representative(name)].strategy
            self._gathered[name] = any(
                self._is_gathered(ref.op) or any(step.communicates for step in self._route(ref, layout))
                for ref, layout in zip(op.refs, strategy.inputs, strict=True)
            )
        return self._gathered[name]

    def _results(self) -> list[fx.Node | None]:
        """Return what forward gives, beside `graph.outputs`; gradients, which come later, are `None`."""
        return [None if each.kind == "gradient" else self._result(each) for each in self.graph.outputs]

    def _result(self, output: Output) -> fx.Node | None:
        if output.ref is None:
            return None
        if output.kind == "output":
            return self._demand(output.ref, self.decisions.outputs[output.name], "forward")
        layout = self.layout(Ref(output.name))
        if output.kind == "mutation":
            return self._demand(output.ref, layout, "forward")
        return self._demand(output.ref, self._summed_in_time(layout), "backward", gradient_of=output.name)

    def _summed_in_time(self, layout: Layout) -> Layout:
        """Return the layout of a gradient that is summed over micro-batches: each of them gives its term.

        One that comes of no sample, of a penalty on a parameter say, is the same in all of them.
        """
        axes = zip(self.decisions.mesh.axes, layout, strict=True)
        return tuple(Partial() if axis.in_time and at == Replicate() else at for axis, at in axes)
