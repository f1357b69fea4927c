"""One program bound to a module's tensors: what runs at every call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from autopar._torch import dtensor_of, dtensor_spec, is_dtensor, keeps_graph, local_of
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Replicate, local_shape
from autopar.runtime.attributes import Attributes
from autopar.runtime.errors import constant_on_meta, frozen_since, gradient_not_planned, unfrozen
from autopar.runtime.executable import compile_graph, place_constants
from autopar.runtime.expected import Expected
from autopar.runtime.failures import told
from autopar.runtime.gloo import backend_name, by_messages
from autopar.runtime.once import once
from autopar.runtime.parameters import slots
from autopar.runtime.placing import dtensor_placements, room_of
from autopar.runtime.program import Program, Result, Value
from autopar.runtime.ranks import Groups, Ranks
from autopar.runtime.seeds import Seeds
from autopar.runtime.whole import whole
from autopar.warning import warn

Backend = Callable[..., Callable[..., Any]]


class Bound:
    """A program whose operators, groups, parameters and layouts are looked up already."""

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        groups: Groups,
        ranks: Ranks,
        backend: Backend = compile_graph,
        *,
        whole_outputs: bool = False,
    ) -> None:
        self.program = program
        self._groups = groups
        self._warned = False
        self.kind = type(model).__name__
        self._backend = backend
        self._mesh: Mesh = groups.mesh
        self.flatten = program.call.flatten
        self.device_type = ranks.device.type
        self._device = ranks.device
        self._on_gloo = self.device_type == "cpu"
        self._backend_name = backend_name(ranks.device.type)
        self.forward = self._compiled(program.local.forward, boxed=False)
        self._backwards: dict[frozenset[int], Callable[[list[Any]], Sequence[Any]]] = {}
        self._find_sources(model, ranks)
        seeding = program.local.seeding
        self._seeds = None if seeding is None else Seeds(seeding, ranks)
        self._seeded = None if seeding is None else seeding.step_seed
        self._expect_inputs()
        self.attributes = Attributes(model, program.call.reads)
        local = program.local
        self.outputs = len(local.outputs)
        self.rebuild = rebuilder(program.result, self.outputs)
        self.saved_from = self.outputs + len(local.mutations)
        self._specs = [self._spec(each) for each in local.outputs]
        self.plain = not any(self._specs)
        totals = program.result.totals
        self._gathered = [
            spec is not None and (whole_outputs or place in totals) for place, spec in enumerate(self._specs)
        ]
        tangents = {each.name: i for i, each in enumerate(p for p in program.placeholders if p.kind == "tangent")}
        self._tangents = [start for start in program.placeholders if start.kind == "tangent"]
        by_path = {each.target: tangents[each.name] for each in self._tangents}
        # Floating outputs beside a loss stay in autograd's graph although no gradient is planned for them: a gradient
        # that arrives there all the same is then an error, not silently lost.
        self.differentiable = [
            each.name in by_path or (bool(by_path) and each.meta is not None and each.meta.is_floating)
            for each in local.outputs
        ]
        self._tangent_of = [by_path.get(each.name) for each in local.outputs]
        self.by_reference = [each for each in local.saved if each.source != "value"]
        self.saved = list(local.saved)
        self.buffers = [self._place_of[each.name] for each in local.mutations]
        trained = {start.name for start in program.placeholders if start.kind == "parameter"}
        self._gradient_specs = [
            self._spec(each, parameter=True) if each.name in trained else None for each in local.gradients
        ]

    def _find_sources(self, model: nn.Module, ranks: Ranks) -> None:
        """Note, for each argument of forward, where its tensor comes from."""
        held = {slot.name: slot for slot in slots(model)}
        starts = [each for each in self.program.placeholders if each.kind != "tangent"]
        self._tables: list[tuple[int, dict[str, Any], str]] = []
        self._constants: list[tuple[int, torch.Tensor]] = []
        self._inputs: list[tuple[int, int]] = []
        self._place_of = {each.name: i for i, each in enumerate(starts)}
        self._count = len(starts)
        missing = []
        for place, start in enumerate(starts):
            if start.kind == "input":
                self._inputs.append((place, start.index))
            elif start.kind == "constant":
                value = self.program.constants[start.name]
                if value.is_meta:
                    missing.append(start.target)
                    continue
                self._constants.append((place, value.to(ranks.device)))
            else:
                slot = held[start.target]
                self._tables.append((place, slot.table, slot.key))
        if missing:
            raise constant_on_meta(missing)
        rooms = {place: room_of(table[key]) for place, table, key in self._tables}
        self._rooms = [(place, room) for place, room in rooms.items() if room is not None]
        graded = [self._place_of[each.name] for each in self.program.local.gradients]
        self._gradient_rooms = [(i, room) for i, place in enumerate(graded) if (room := rooms.get(place)) is not None]
        self._graded = graded
        self._names = [start.target for start in starts]
        trained = set(graded)
        self._trained = [
            (place, table, key, place in trained)
            for place, table, key in self._tables
            if starts[place].kind == "parameter"
        ]

    def _expect_inputs(self) -> None:
        by_place = {each.name: each for each in self.program.local.inputs}
        starts = {each.index: each.name for each in self.program.placeholders if each.kind == "input"}
        tensors = self.program.call.tensors
        expected: list[tuple[torch.Size, torch.dtype]] = []
        for index, tensor in enumerate(tensors):
            layout = by_place[starts[index]].layout
            shape = torch.Size(local_shape(tensor.meta.shape, layout, self._mesh.sizes))
            expected.append((shape, getattr(torch, tensor.meta.dtype)))
        self.expected = Expected(self.program.call, expected)
        values = {node.name: node.meta["val"] for node in self.program.local.forward.graph.find_nodes(op="placeholder")}
        self._strides = [values[starts[index]].stride() for index in range(len(tensors))]

    def _spec(self, value: Value, *, parameter: bool = False) -> Any:
        """Return the DTensor description of what crosses the border; `None` where it is a plain tensor."""
        if value.meta is None or not self._mesh.axes:
            return None
        if not parameter and (not value.meta.shape or all(isinstance(p, Replicate) for p in value.layout)):
            return None
        placements = dtensor_placements(value.name, value.layout, self._mesh)
        shape = value.meta.shape
        dtype = getattr(torch, value.meta.dtype)
        return dtensor_spec(self._groups.device_mesh, placements, shape, dense_strides(shape), dtype)

    def __call__(self, tensors: Sequence[torch.Tensor], *, grad: bool) -> Any:
        """Run a step on a call's tensors; return the model's return value.

        Raises:
            InputMismatchError: a parameter is to be trained that was frozen when the plan was made.
        """
        if grad:
            self._check_trained()
        given: list[Any] = [None] * self._count
        for place, table, key in self._tables:
            given[place] = table[key]
        for place, value in self._constants:
            given[place] = value
        for place, index in self._inputs:
            tensor = tensors[index]
            strides = self._strides[index]
            given[place] = tensor if tensor.stride() == strides else restrided(tensor, strides)
        if grad:
            outputs = _Step.apply(self, given, *[given[place] for place in self._graded])  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                outputs = self.run(given)[0]
        if any(self._gathered):
            outputs = [whole(each) if is_read else each for each, is_read in zip(outputs, self._gathered, strict=True)]
        return self.rebuild(outputs)

    def _check_trained(self) -> None:
        frozen = []
        for place, table, key, trained in self._trained:
            if table[key].requires_grad is not trained:
                if not trained:
                    raise unfrozen(self._names[place])
                frozen.append(self._names[place])
        if frozen and not self._warned:
            self._warned = True
            warn(frozen_since(frozen))

    def run(self, given: list[Any]) -> tuple[list[Any], list[torch.Tensor], Sequence[Any], int | None]:
        """Run forward on `given`, which becomes local tensors.

        Returns user outputs as the user gets them, the same as local tensors, what is saved by value, and the seed.
        """
        local = given if not self._mesh.axes else [local_of(each) for each in given]
        for place, room in self._rooms:
            local[place] = room.around(local[place])
        seed = None
        if self._seeds is None or self._seeded is None:
            made = self._run(self.forward, *local)
        else:
            seed = self._seeds.draw()
            with self._seeded(seed):
                made = self._run(self.forward, *local)
        plain = list(made[: self.outputs])
        for place, new in zip(self.buffers, made[self.outputs : self.saved_from], strict=True):
            local[place].copy_(new)
        visible = plain
        if not self.plain:
            visible = [
                each if spec is None else dtensor_of(each, spec) for each, spec in zip(plain, self._specs, strict=True)
            ]
        given[:] = local
        return visible, plain, made[self.saved_from :], seed

    def _run(self, program: Callable[..., Sequence[Any]], *arguments: Any) -> Sequence[Any]:
        """Return what a program makes.

        Raises:
            CollectiveError: a collective of it failed.
        """
        try:
            return program(*arguments)
        except RuntimeError as error:
            named = told(error, program, self._groups.rank, self._backend_name, self._groups.names)
            if named is None:
                raise
            raise named from error

    def _compiled(self, gm: fx.GraphModule, *, boxed: bool) -> Callable[..., Sequence[Any]]:
        own = place_constants(by_messages(gm) if self._on_gloo else gm, self._device)
        return self._backend(own, self._groups.names, boxed=boxed)

    def backward(self, arguments: list[Any], grads: Sequence[Any], seed: int | None) -> list[Any]:
        """Run backward on saved values (a list that is emptied) and the gradients of user outputs, `None` if absent."""
        tangents: list[Any] = [None] * len(self._tangents)
        for place, grad, spec, output in zip(
            self._tangent_of, grads, self._specs, self.program.local.outputs, strict=True
        ):
            if place is None and grad is not None:
                raise gradient_not_planned(output.name)
            if place is not None and grad is not None:
                tangents[place] = _local_tangent(grad, spec)
        absent = frozenset(i for i, each in enumerate(tangents) if each is None)
        if absent not in self._backwards:
            names = {self._tangents[i].name for i in absent}
            program = self.program.local.backward_without(names)
            if program is None:
                raise RuntimeError("the program was captured without its backward")
            self._backwards[absent] = self._compiled(program, boxed=True)
        arguments += tangents
        del tangents, grads
        if seed is None or self._seeded is None:
            made = self._run(self._backwards[absent], arguments)
        else:
            with self._seeded(seed):
                made = self._run(self._backwards[absent], arguments)
        if self._gradient_rooms:
            made = list(made)
            for i, room in self._gradient_rooms:
                made[i] = None if made[i] is None else room.of(made[i])
        return [
            each if each is None or spec is None else dtensor_of(each, spec)
            for each, spec in zip(made, self._gradient_specs, strict=True)
        ]


class _Step(torch.autograd.Function):
    """A whole training step as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, bound: Bound, given: list[Any], *_graded: torch.Tensor) -> Any:
        visible, plain, values, ctx.seed = bound.run(given)
        ctx.bound = bound
        ctx.values = list(values)
        # By reference: parameters, inputs and outputs, whose later overwriting autograd then notices.
        ctx.save_for_backward(*[given[s.index] if s.source == "input" else plain[s.index] for s in bound.by_reference])
        ctx.mark_non_differentiable(*[o for o, ok in zip(visible, bound.differentiable, strict=True) if not ok])
        ctx.set_materialize_grads(False)
        return tuple(visible)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        bound: Bound = ctx.bound
        references = iter(ctx.saved_tensors)
        values = ctx.values
        arguments = [next(references) if s.source != "value" else values[s.index] for s in bound.saved]
        if not keeps_graph():
            ctx.values = None
        del values
        with torch.autocast(bound.device_type, enabled=False), torch.no_grad():
            made = bound.backward(arguments, grads, ctx.seed)
        return (None, None, *once(made, bound.kind))


def rebuilder(result: Result, count: int) -> Callable[[Sequence[Any]], Any]:
    """Return what makes the model's return value of its tensors; where that is one tensor or a tuple, at no cost."""
    if result.totals:
        return result.rebuild
    marks = [object() for _ in range(count)]
    made = result.rebuild(marks)
    if count == 1 and made is marks[0]:
        return operator.itemgetter(0)
    if type(made) is tuple and len(made) == count and all(a is b for a, b in zip(made, marks, strict=True)):
        return tuple
    return result.rebuild


def _local_tangent(grad: torch.Tensor, spec: Any) -> torch.Tensor:
    if spec is None:
        grad = whole(grad)  # of a loss that the user adds DTensors to
    elif is_dtensor(grad):
        if grad._spec.placements != spec.placements:  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=spec.placements)  # type: ignore[attr-defined]
        grad = local_of(grad)
    return grad if grad.is_contiguous() else grad.contiguous()


def restrided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor laid out in memory as the program was captured for; dimensions of size 1 have any stride."""
    same = all(a == b for a, b, n in zip(tensor.stride(), strides, tensor.shape, strict=True) if n > 1)
    if same or not tensor.numel():
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
