"""A step of several stages or micro-batches bound to a module's tensors: what runs at every call.

`forward` runs the whole schedule, backward actions included, with tangent 1 for the loss; `backward()` multiplies the
gradients by the tangent that arrives and hands them over. So the user's loop is that of any other module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from autopar._torch import dtensor_of, keeps_graph
from autopar.ir.placement import local_shape
from autopar.ir.schedule import PipelineSchedule
from autopar.ir.timeline import Event
from autopar.runtime import stop_notes
from autopar.runtime.attributes import Attributes
from autopar.runtime.backend_words import plainly
from autopar.runtime.borrowing import Loans, form_of, loans, returns
from autopar.runtime.errors import (
    CollectiveError,
    PeerLostError,
    batch_not_divisible,
    constant_on_meta,
    frozen_since,
    gradient_not_planned,
    no_single_loss,
    own_failure,
    peer_failed,
    pipeline_stopped,
    state_elsewhere,
    unfrozen,
)
from autopar.runtime.executable import compile_graph, place_constants
from autopar.runtime.expected import Expected
from autopar.runtime.failures import told
from autopar.runtime.gloo import backend_name, by_messages
from autopar.runtime.once import once
from autopar.runtime.parameters import slots
from autopar.runtime.pipeline_outputs import Outputs
from autopar.runtime.pipeline_ranks import PipelineRanks
from autopar.runtime.pipeline_step import Input, Sources, Step, Tied, Totals, Way
from autopar.runtime.placing import room_of
from autopar.runtime.program import Start
from autopar.runtime.routes import forward_only, routes
from autopar.runtime.seeds import Seeds
from autopar.runtime.stage_run import StageRun, Take
from autopar.runtime.staged_program import PipelinedProgram, read_by_totals
from autopar.runtime.step import Backend, rebuilder
from autopar.runtime.whole import whole
from autopar.warning import warn

_STATES = frozenset({"parameter", "buffer"})


class StagedBound:
    """A staged program whose operators, groups, parameters, messages and layouts are looked up already."""

    def __init__(
        self,
        program: PipelinedProgram,
        model: nn.Module,
        pipeline: PipelineRanks,
        backend: Backend = compile_graph,
        *,
        whole_outputs: bool = False,
    ) -> None:
        """Bind `program` to `model`, whose parameters are placed; all ranks must call this.

        Raises:
            AutoparError: on all ranks, if a rank's program or batch does not fit.
        """
        self.program = program
        self.flatten = program.call.flatten
        self.rebuild = rebuilder(program.result, len(program.staged.outputs))
        self.attributes = Attributes(model, program.call.reads)
        self._pipeline = pipeline
        self._backend = backend
        self._whole_outputs = whole_outputs
        self._stopped = ""
        self._warned = False
        self.kind = type(model).__name__
        self._programs: list[Callable[..., Any]] = []
        self.events: Sequence[Event] = ()
        """When this rank computed what in its last step, as the host saw it; `time.perf_counter` is its clock."""
        pipeline.ranks.agree("pipeline's schedule and transfers", _digest(program))
        with pipeline.ranks.together("bind the stages' programs"):
            self._loss = _loss(program)
            self._inputs = self._bind_inputs()
            self._ways = {False: self._way(forward_only(program.schedule), backward=False)}
            if self._loss is not None:
                self._ways[True] = self._way(program.schedule, backward=True)
            self._bind_model(model)
        self._sources = self._bind_shared()
        # Ranks whose stages train nothing still call backward on the loss.
        self._anchor = torch.zeros((), device=pipeline.ranks.device, requires_grad=True)

    def _compiled(self, gm: fx.GraphModule, taken: Mapping[int, Take] | None = None) -> Callable[..., Any]:
        device = self._pipeline.ranks.device
        own = place_constants(by_messages(gm) if device.type == "cpu" else gm, device)
        more = {"taken": taken} if taken else {}
        self._programs.append(self._backend(own, self._pipeline.groups.names, boxed=True, **more))
        return self._programs[-1]

    def _way(self, schedule: PipelineSchedule, *, backward: bool) -> Way:
        staged, device = self.program.staged, self._pipeline.ranks.device
        count, at_once = schedule.microbatches, self.program.batch_overlap
        runs = {
            number: StageRun(each, self._compiled, backward=backward, actions=count, at_once=at_once, device=device)
            for number, each in staged.stages.items()
        }
        return Way(routes(schedule, staged.transfers, self._pipeline.index), runs, trains=backward)

    def _bind_inputs(self) -> dict[str, Input]:
        """Note the shape of each input, and how micro-batches share it."""
        program, count = self.program, self.program.microbatches
        layouts = {each.name: each.layout for each in program.inputs}
        starts = {each.index: each.name for each in program.placeholders if each.kind == "input"}
        strides = _planned_strides(program)
        expected: list[tuple[torch.Size, torch.dtype]] = []
        found = {}
        for index, tensor in enumerate(program.call.tensors):
            name = starts[index]
            shape = torch.Size(local_shape(tensor.meta.shape, layouts[name], self._pipeline.groups.mesh.sizes))
            expected.append((shape, getattr(torch, tensor.meta.dtype)))
            rows = None
            if name in program.split_inputs:
                if shape[0] % count:
                    raise batch_not_divisible(tensor.path, shape[0], count)
                rows = shape[0] // count
            found[name] = Input(index, rows, strides.get(name))
        self.expected = Expected(program.call, expected)
        return found

    def _bind_model(self, model: nn.Module) -> None:
        """Note where the tensors of parameters, buffers and constants come from."""
        stages = [stage for way in self._ways.values() for stage in way.stages.values()]
        wanted = {name for stage in stages for name in (*stage.starts, *stage.mutated)}
        wanted |= read_by_totals(self.program.staged, wanted)
        held = {slot.name: slot for slot in slots(model)}
        self._tables: dict[str, tuple[dict[str, Any], str]] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._parameters: list[Start] = []
        for start in self.program.placeholders:
            if start.name in wanted and start.kind == "constant":
                value = self.program.constants[start.name]
                if value.is_meta:
                    raise constant_on_meta([start.target])
                self._constants[start.name] = value.to(self._pipeline.ranks.device)
            elif start.kind in ("parameter", "buffer") and start.target in held:
                slot = held[start.target]
                self._tables[start.name] = slot.table, slot.key
                if start.kind == "parameter":
                    self._parameters.append(start)
        rooms = {name: room_of(table[key]) for name, (table, key) in self._tables.items()}
        self._rooms = {name: room for name, room in rooms.items() if room is not None}
        sums = {name for each in self.program.staged.totals for name in each.names}
        known = {*self._tables, *self._constants, *self._inputs, *sums}
        self._absent = sorted(wanted - known)
        states = {start.name: start.target for start in self.program.placeholders if start.kind in _STATES}
        self._changed = sorted({name for stage in stages for name in stage.mutated})
        fixed = [name for name in self._absent if name not in states]
        if fixed:
            raise RuntimeError(f"this rank's stages take {fixed}, which are not on it: a fault of this compiler")
        if self._absent and self._loss is not None:
            raise state_elsewhere([states[name] for name in self._absent])

    def _bind_shared(self) -> Sources:
        """Learn from all ranks what crosses stages: who makes which output, what is trained, who draws."""
        program, pipeline, staged = self.program, self._pipeline, self.program.staged
        own = {name for stage in self._ways[max(self._ways)].stages.values() for name in stage.trained}
        made = {e.name for stage in staged.stages.values() for e in stage.gives if e.kind == "output"}
        told = pipeline.ranks.gather((made, own, any(map(_draws, _graphs(program)))))
        makers = {name: pipeline.holder(rank) for rank, (names, _, _) in enumerate(told) for name in sorted(names)}
        lost = [name for name, _ in staged.outputs if name not in makers]
        if lost:
            raise RuntimeError(f"no stage makes the outputs {lost}: a fault of this compiler")
        self._trained = {name for _, names, _ in told for name in names}
        rank_of = program.schedule.rank_of
        tied = []
        for tie in staged.ties:
            on = sorted({rank_of[stage] for stage in tie.stages})
            group = pipeline.shared_by(on)  # made by all ranks, also those that do not share it
            if group is not None:
                tied.append(Tied(tie.name, group, tuple(map(pipeline.rank_at, on))))
        own |= {tie.name for tie in tied}
        pipeline.meet((rank_of[each.source], rank_of[each.target]) for each in staged.transfers)
        self._graded = [start for start in self._parameters if start.name in own]
        self._graded_inputs = [s for s in program.placeholders if s.kind == "input" and s.name in self._trained]
        draws = any(drawn for _, _, drawn in told)
        taken = {name for stage in self._ways[False].stages.values() for name in stage.starts}
        taken |= {name for stage in self._ways[max(self._ways)].stages.values() for name in stage.starts}
        needed = any(not taken.isdisjoint(each.names) for each in staged.totals)
        totals = [
            Totals(self._compiled(each.program), each.takes, each.names, each.reduces)
            for each in staged.totals
            if needed
        ]
        return Sources(
            microbatches=program.microbatches,
            at_once=program.batch_overlap,
            inputs=self._inputs,
            tables=self._tables,
            rooms=self._rooms,
            constants=self._constants,
            totals=totals,
            seeding=program.seeding,
            seeds=Seeds(program.seeding, pipeline.ranks) if draws and program.seeding is not None else None,
            outputs=Outputs(program, pipeline, makers, whole=self._whole_outputs),
            tied=tied,
            graded_inputs=[start.name for start in self._graded_inputs],
            one=self._unit_tangent(),
            joined=staged.joined,
            loans=self._loans(),
        )

    def _loans(self) -> Loans:
        """Learn from all ranks what evaluation needs of other pipeline ranks, and changes there."""
        told = self._pipeline.ranks.gather((self._absent, self._changed))
        lacks, changes = [absent for absent, _ in told], [changed for _, changed in told]
        asked = {name for names in (*lacks, *changes) for name in names}
        if not asked or self._pipeline.depth == 1:
            return Loans()
        mine = {
            name: form_of(table[key], self._rooms.get(name))
            for name, (table, key) in self._tables.items()
            if name in asked
        }
        held = self._pipeline.ranks.gather(mine)
        return Loans(loans(self._pipeline, lacks, held), returns(self._pipeline, changes, held))

    def _unit_tangent(self) -> torch.Tensor | None:
        meta = None if self._loss is None else self.program.outputs[self._loss].meta
        if meta is None:
            return None
        return torch.ones((), dtype=getattr(torch, meta.dtype), device=self._pipeline.ranks.device)

    def __call__(self, tensors: Sequence[torch.Tensor], *, grad: bool) -> Any:
        """Run a step on a call's tensors; return the model's return value.

        With `grad` that includes the backward of all micro-batches, whether or not the loss is then given to backward.

        Raises:
            PeerLostError: another rank stopped.
            InputMismatchError: a parameter is to be trained that was frozen when the plan was made.
        """
        if self._stopped:
            raise pipeline_stopped(self._stopped)
        if not grad or self._loss is None:
            with torch.no_grad():
                outputs, _ = self.run(tensors, backward=False)
            return self.rebuild(outputs)
        held = self._held()
        trained = self._trained if self.program.trained is None else self.program.trained
        frozen = []
        for start in self._parameters:
            if held[start.name].requires_grad is not (start.name in trained):
                if start.name not in trained:
                    raise self._refused(unfrozen(start.target))
                frozen.append(start.target)
        if frozen and not self._warned:
            self._warned = True
            warn(frozen_since(frozen))
        graded = [held[start.name] for start in self._graded]
        graded += [tensors[start.index] for start in self._graded_inputs]
        outputs = _PipelineStep.apply(self, tensors, self._anchor, *graded)  # type: ignore[no-untyped-call]
        return self.rebuild(outputs)

    def _refused(self, error: Exception) -> Exception:
        """Return an error before a step, which the ranks that wait for this one are told of."""
        if self._pipeline.depth > 1:
            stages = sorted(self._ways[False].stages)
            told_of = own_failure(self._pipeline.ranks.rank, stages, None, f"{type(error).__name__}: {error}")
            stop_notes.leave(self._pipeline.name, told_of)
        return error

    def _held(self) -> dict[str, torch.Tensor]:
        return {start.name: self._tables[start.name][0][self._tables[start.name][1]] for start in self._parameters}

    def run(self, tensors: Sequence[torch.Tensor], *, backward: bool) -> tuple[list[Any], list[torch.Tensor | None]]:
        """Return the user outputs and, with `backward`, the local gradients of what is trained, for tangent 1."""
        step = Step(self._ways[backward], self._sources, self._pipeline, tensors)
        self.events = step.events
        try:
            outputs, gradients = step.run()
        except PeerLostError as error:
            self._stopped = str(error)
            note = stop_notes.read(self._pipeline.name)
            if note:
                raise peer_failed(str(error), note) from error
            raise
        except Exception as error:
            raise self._failed(step, error) from error
        return outputs, [gradients.pop(start.name, None) for start in (*self._graded, *self._graded_inputs)]

    def _failed(self, step: Step, error: Exception) -> Exception:
        """Return what to raise after an error in this rank's own program, which the others are told of."""
        ranks, stages = self._pipeline.ranks, sorted(self._ways[False].stages)
        named = self._collective(error)
        note = stop_notes.read(self._pipeline.name) if self._pipeline.depth > 1 else ""
        if note and isinstance(error, RuntimeError):
            # A collective of the stage failed because its peer had.
            self._stopped = note
            return peer_failed(str(named) if named is not None else plainly(str(error)), note)
        error = named or error
        self._stopped = f"{type(error).__name__}: {error}"
        if self._pipeline.depth > 1:
            action = None if step.action is None else step.action.words
            stop_notes.leave(self._pipeline.name, own_failure(ranks.rank, stages, action, self._stopped))
        return error

    def _collective(self, error: Exception) -> CollectiveError | None:
        """Return the error that names the collective of a stage's program in which a step failed; `None` elsewhere."""
        if not isinstance(error, RuntimeError):
            return None
        ranks, names = self._pipeline.ranks, self._pipeline.groups.names
        backend = backend_name(ranks.device.type)
        tried = (told(error, program, ranks.rank, backend, names) for program in self._programs)
        return next((found for found in tried if found is not None), None)

    def non_differentiable(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs that stay out of autograd's graph; a gradient into others beside the loss is an error."""
        metas = [value.meta for value in self.program.outputs]
        pairs = zip(outputs, metas, strict=True)
        plain = [out for out, meta in pairs if meta is None or not meta.is_floating]
        return [out for out in plain if isinstance(out, torch.Tensor)]

    def scaled(self, gradients: list[torch.Tensor | None], grads: Sequence[torch.Tensor | None]) -> list[Any]:
        """Return the gradients for the tangents that arrive at the user outputs, as the parameters hold them.

        `gradients` is used up, unless the backward pass is to be repeated.

        Raises:
            InputMismatchError: a gradient arrives at an output beside the loss.
        """
        for place, grad in enumerate(grads):
            if grad is not None and place != self._loss:
                raise gradient_not_planned(self.program.outputs[place].name)
        tangent = None if self._loss is None else grads[self._loss]
        if tangent is not None:
            tangent = whole(tangent)  # of a loss that the user adds DTensors to
        again = keeps_graph()
        held = self._held()
        specs = [getattr(held[start.name], "_spec", None) for start in self._graded]
        specs += [None] * len(self._graded_inputs)
        rooms = [self._rooms.get(start.name) for start in self._graded] + [None] * len(self._graded_inputs)
        # A loss that is given to backward as it is has tangent 1: most steps need no pass over the gradients.
        as_is = tangent is None or bool(tangent == 1)
        if not as_is:
            self._spread_overflow(gradients)
        found: list[Any] = [None] * len(specs)
        for place, spec in enumerate(specs):
            gradient = gradients[place]
            if not again:
                gradients[place] = None
            if gradient is None or tangent is None:
                continue
            if again:
                gradient = gradient * tangent
            elif not as_is:
                gradient = gradient.mul_(tangent)
            room = rooms[place]
            gradient = gradient if room is None else room.of(gradient)
            found[place] = gradient if spec is None else dtensor_of(gradient, spec)
        return found

    def _spread_overflow(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Let all pipeline ranks see that one has a gradient that is not finite: a GradScaler skips a step on all.

        A scaler looks at a rank's own gradients; it is told by a NaN in one of them.
        """
        if self._pipeline.depth == 1:
            return
        found = [each for each in gradients if each is not None and each.is_floating_point()]
        over = [each.isfinite().all().logical_not() for each in found]
        flag = torch.stack(over).any().float() if over else torch.zeros((), device=self._pipeline.ranks.device)
        torch.distributed.all_reduce(flag, group=self._pipeline.line)
        if flag and found and not any(over):
            found[0].view(-1)[:1].fill_(torch.nan) if found[0].is_contiguous() else found[0].fill_(torch.nan)


class _PipelineStep(torch.autograd.Function):
    """A whole step of all micro-batches as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, bound: StagedBound, tensors: Sequence[torch.Tensor], *_graded: torch.Tensor) -> Any:
        outputs, ctx.gradients = bound.run(tensors, backward=True)
        ctx.bound = bound
        ctx.mark_non_differentiable(*bound.non_differentiable(outputs))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            made = ctx.bound.scaled(ctx.gradients, grads)
        return (None, None, None, *once(made, ctx.bound.kind))


def _loss(program: PipelinedProgram) -> int | None:
    """Return which user output is the loss; `None` if the program has no backward.

    Raises:
        UsageError: gradients start elsewhere too, or at something larger than a scalar.
    """
    starts = [each.target for each in program.placeholders if each.kind == "tangent"]
    if not starts:
        return None
    scalars = [i for i, each in enumerate(program.outputs) if each.name in starts and each.meta and not each.meta.shape]
    if len(starts) != 1 or len(scalars) != 1:
        raise no_single_loss(starts)
    return scalars[0]


def _graphs(program: PipelinedProgram) -> Iterator[fx.GraphModule]:
    for stage in program.staged.stages.values():
        yield from (gm for gm in (stage.forward, stage.backward, stage.weights) if gm is not None)


def _draws(gm: fx.GraphModule) -> bool:
    """Return whether a program has random operators with a seed of their own."""
    return any(getattr(node.target, "namespace", "") == "autopar" for node in gm.graph.nodes)


def _planned_strides(program: PipelinedProgram) -> dict[str, tuple[int, ...]]:
    """Return the strides of the starts of this rank's programs, as far as their placeholders tell."""
    found = {}
    for gm in _graphs(program):
        for node in gm.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                found[str(node.target)] = value.stride()
    return found


def _digest(program: PipelinedProgram) -> str:
    """Return a digest of what all ranks must hold alike, or messages would be lost and ranks hang."""
    staged = program.staged
    transfers = [(e.value, e.source, e.target, e.phase, tuple(e.shape), e.dtype) for e in staged.transfers]
    ties = [(each.name, tuple(each.stages)) for each in staged.ties]
    text = repr((program.schedule, transfers, ties, tuple(staged.outputs)))
    return hashlib.sha256(text.encode()).hexdigest()
