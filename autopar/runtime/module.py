"""The compiled module: the user's module tree with another forward."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn

from autopar._torch import allow_plain_beside_dtensor, is_transformed, let_anomalies_be_found
from autopar.errors import ArgumentsDifferError, InputMismatchError
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Shard
from autopar.ir.plan import Decisions
from autopar.ir.reads import is_number
from autopar.ir.squeeze import squeeze
from autopar.ir.timeline import Event
from autopar.runtime.attributes import AsCalled, changed, own_attributes
from autopar.runtime.call_errors import (
    attribute_differs,
    autocast_differs,
    many_forms,
    mode_differs,
    other_form,
    transformed,
)
from autopar.runtime.compiled_class import ELSEWHERE, RUNNER, compiled_class, word
from autopar.runtime.copying import copy_tree, hooks_of, without_own_calls
from autopar.runtime.errors import dtype_changed, hooks_not_called, module_replaced, not_compiled
from autopar.runtime.initialising import mark_elsewhere
from autopar.runtime.optimizer_errors import nothing_trained_here
from autopar.runtime.parameters import InitFn, check, place, slots
from autopar.runtime.partners import Partners
from autopar.runtime.pipeline import StagedBound
from autopar.runtime.pipeline_ranks import PipelineRanks
from autopar.runtime.placing import own_part
from autopar.runtime.profiling import StepProfiler
from autopar.runtime.program import Program
from autopar.runtime.ranks import Groups, Ranks
from autopar.runtime.reader import Reader
from autopar.runtime.same_batch import SameBatch
from autopar.runtime.staged_program import PipelinedProgram
from autopar.runtime.step import Backend, Bound
from autopar.runtime.whole import assign_data, draw_for_the_whole, plain_arguments, refuse_numbers_of_parts
from autopar.runtime.writing import write_through
from autopar.warning import warn

ProgramFor = Callable[[bool, bool, tuple[Any, ...], Mapping[str, Any]], Program | PipelinedProgram]
"""`program_for(training, grad, args, kwargs)`: the program for a mode and a form of call; asked once for each."""


_MANY_FORMS = 8
"""So many programs for one mode are told of: each takes as long to make as a plan, and they are all kept."""


class Runner:
    """Chooses the program for each call of one compiled module, and runs it.

    Each mode and form of call has a program of its own, made when it is first met. In the mode that was planned for
    (`planned`: training, gradients) plain values are the planned ones. `batch` is the layout of the batch
    that ranks bring to a call in parts. `pipeline` is the place of this rank where programs are
    `PipelinedProgram`s; the decisions' mesh is then that of one pipeline rank. `autocast` is the type that programs
    cast to, `None` where they do not. With `whole_outputs` every rank gets all outputs, as plain tensors. `introduce`
    are functions that are to know each module which runs the programs: the compiled one, and copies of it. `as_called`
    lets programs be captured with the attributes that the called module has by then.
    """

    def __init__(
        self,
        decisions: Decisions,
        ranks: Ranks,
        program_for: ProgramFor,
        *,
        planned: tuple[bool, bool] = (True, True),
        backend: Backend | None = None,
        batch: Layout | None = None,
        pipeline: PipelineRanks | None = None,
        profiler: StepProfiler | None = None,
        autocast: torch.dtype | None = None,
        whole_outputs: bool = False,
        introduce: Sequence[Callable[[nn.Module], None]] = (),
        as_called: AsCalled | None = None,
    ) -> None:
        self._profiler = profiler
        self._autocast = autocast
        self._modes: tuple[tuple[str, bool], ...] = ()
        self._modules: tuple[ref[nn.Module], ...] = ()
        self._children: tuple[tuple[str, ref[nn.Module], tuple[tuple[str, ref[nn.Module]], ...]], ...] = ()
        self._types: tuple[tuple[ref[nn.Module], tuple[tuple[bool, str, torch.dtype], ...]], ...] = ()
        self._hooks: frozenset[int] = frozenset()
        self._warned = self._told = False
        self.calls = 0
        """How often programs were asked for."""
        self._partners: Partners | None = None
        self.decisions = squeeze(decisions)
        self.ranks = ranks
        self.pipeline = pipeline
        streams = self.decisions.streams
        own = self.decisions.levels
        self.groups = Groups.of(self.decisions.mesh, ranks, streams, own) if pipeline is None else pipeline.groups
        self.part = _part(self.decisions.mesh, batch, self.groups.rank)
        self._same_batch = SameBatch(ranks, parts=self.part[1] > 1)
        self._program_for = program_for
        self._planned = planned
        self._how: dict[str, Any] = {"whole_outputs": whole_outputs}
        if backend is not None:
            self._how["backend"] = backend
        self._known: dict[tuple[bool, bool], list[Bound | StagedBound]] = {}
        self._readers: dict[tuple[Any, ...], tuple[Bound | StagedBound, Reader]] = {}
        self._unbound: dict[tuple[bool, bool], list[Program | PipelinedProgram]] = {}
        self._introduce = introduce
        self._as_called = as_called
        self._held: dict[tuple[str, str], Any] = {}
        self._is_copy = False
        self.held_before: frozenset[str] = frozenset()
        """Names of the parameters here that an earlier pipeline rank holds too."""
        meshes = [self.groups.device_mesh] if self.groups.mesh.axes else []
        if pipeline is not None:
            meshes += pipeline.meshes
        if meshes:
            allow_plain_beside_dtensor()
            let_anomalies_be_found()
            refuse_numbers_of_parts(meshes)
            draw_for_the_whole(meshes)
            assign_data(meshes)
            write_through(meshes)

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what `model(*args, **kwargs)` would.

        Raises:
            InputMismatchError: the call differs from what was planned.
            UsageError: it is inside a transform of torch.func.
        """
        self.calls += 1
        if is_transformed():
            raise transformed(type(model).__name__)
        self._check_modes()
        self._check_parts()
        self._check_types(model)
        if self.pipeline is not None:
            if self._partners is None:
                self._partners = Partners.of(model, model.__dict__.get(ELSEWHERE, ()))
            self._partners.check()
        grad = torch.is_grad_enabled()
        if self._profiler is not None and grad:
            self._profiler.step()
        mode = (model.training, grad)
        self._same_batch.look(mode, model, args, kwargs)
        form = (*mode, len(args), *kwargs)
        known = self._readers.get(form)
        if known is not None:
            bound, reader = known
            tensors = reader.read(args, kwargs)
            if tensors is not None and bound.expected.matches(tensors, grad=grad) and bound.attributes.same():
                return self._run(bound, tensors, grad=grad)
        self._check_hooks()
        args, kwargs = plain_arguments(args, kwargs)
        bound, tensors = self._find(model, mode, args, kwargs)
        made = Reader.of(bound, args, kwargs)
        if made is not None:
            self._readers[form] = (bound, made)
        return self._run(bound, tensors, grad=grad)

    @functools.cached_property
    def with_whole_outputs(self) -> Runner:
        """Return the runner of the same programs and tensors that gives every rank all outputs, as plain tensors."""
        if self._how["whole_outputs"]:
            return self
        made = copy.copy(self)
        made._known, made._readers = {}, {}
        made._how = {**self._how, "whole_outputs": True}
        made._unbound = self._programs()
        return made

    def _programs(self) -> dict[tuple[bool, bool], list[Program | PipelinedProgram]]:
        """Return the programs that there are by now."""
        found = {mode: [each.program for each in bound] for mode, bound in self._known.items()}
        for mode, programs in self._unbound.items():
            found.setdefault(mode, []).extend(programs)
        return found

    def know_modes(self, model: nn.Module, copied: nn.Module) -> None:
        """Note which modules of the model that was planned train, and those whose modes the calls are to have."""
        self._modes = tuple((name, each.training) for name, each in model.named_modules())
        self._held = own_attributes(copied)
        self._hooks = frozenset(key for each in copied.modules() for key in hooks_of(each))
        self.watch(copied)

    def watch(self, called: nn.Module) -> None:
        """Note that it is `called` that is called, and has the modes and parts that count; it is not kept alive."""
        self._modules = tuple(ref(each) for each in called.modules())
        self._types = tuple((ref(each), _types(each)) for each in called.modules())
        self._children = tuple(
            (name, ref(each), tuple((key, ref(child)) for key, child in each._modules.items() if child is not None))
            for name, each in called.named_modules()
            if each._modules
        )

    def _check_parts(self) -> None:
        """Raise where a module was replaced, added or removed since the model was compiled."""
        for name, at, known in self._children:
            module = at()
            if module is None:
                continue  # its parent is told of
            now = module._modules
            if len(now) == len(known) and all(now.get(key) is child() for key, child in known):
                continue
            before = {key: child() for key, child in known}
            held = {key: child for key, child in now.items() if child is not None}
            changed = [key for key in {**before, **held} if key not in before or held.get(key) is not before[key]]
            if changed:
                raise module_replaced(name, changed[0])

    def _check_types(self, model: nn.Module) -> None:
        """Raise where a parameter or buffer has another dtype since the model was compiled: by a part's `.half()`."""
        for at, types in self._types:
            module = at()
            if module is None:
                continue
            for parameters, key, planned in types:
                held = (module._parameters if parameters else module._buffers).get(key)
                if held is not None and held.dtype is not planned:
                    path = next(path for path, each in model.named_modules() if each is module)
                    name = f"{path}.{key}" if path else key
                    raise dtype_changed(type(model).__name__, name, *(word(each) for each in (planned, held.dtype)))

    def _check_hooks(self) -> None:
        """Warn of hooks on modules inside the model, which no program calls."""
        alive = zip(self._modes, (each() for each in self._modules), strict=True)
        hooked = [name for (name, _), each in alive if name and each is not None and hooks_of(each) - self._hooks]
        if hooked and not self._warned:
            self._warned = True
            warn(hooks_not_called(hooked))

    def introduce(self, model: nn.Module) -> None:
        """Let whoever must know the modules that run these programs know this one."""
        for each in self._introduce:
            each(model)

    def for_copy(self, copied: nn.Module) -> Runner:
        """Return the runner of a deep copy of the module: the same programs, on the copy's tensors."""
        made = copy.copy(self)
        made._known, made._readers, made._partners, made._is_copy = {}, {}, None, True
        made._unbound = self._programs()
        made.__dict__.pop("with_whole_outputs", None)  # it is of the tensors of this one
        made.watch(copied)
        made.introduce(copied)
        return made

    def _check_modes(self) -> None:
        """Raise where a module trains that did not when the program was captured, or the reverse."""
        alive = [each() for each in self._modules]
        now = [each.training for each in alive if each is not None]
        if not now or len(now) < len(self._modes):
            return
        planned = [trains for _, trains in self._modes] if now[0] is self._modes[0][1] else [now[0]] * len(now)
        if now != planned:
            name, trains = next(
                (name, is_now)
                for (name, _), is_now, was in zip(self._modes, now, planned, strict=True)
                if is_now != was
            )
            raise mode_differs(name, now=trains)

    def _run(self, bound: Bound | StagedBound, tensors: Sequence[torch.Tensor], *, grad: bool) -> Any:
        kind = self.ranks.device.type
        if not torch.is_autocast_enabled(kind):
            return bound(tensors, grad=grad)
        around = torch.get_autocast_dtype(kind)
        if around != self._autocast:
            raise autocast_differs(str(around), None if self._autocast is None else str(self._autocast))
        # The programs' casts are their own operators.
        with torch.autocast(kind, enabled=False):
            return bound(tensors, grad=grad)

    @property
    def events(self) -> Sequence[Event]:
        """Return when this rank computed what in the last step that trained, of a program with stages; else nothing.

        Seconds are of `time.perf_counter`, which ranks of one machine share. On a device that the host runs ahead of
        they are those of launches.
        """
        bound = [each for each in self._known.get((True, True), ()) if isinstance(each, StagedBound)]
        return bound[-1].events if bound else ()

    def _find(
        self, model: nn.Module, mode: tuple[bool, bool], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Bound | StagedBound, list[torch.Tensor]]:
        """Return the program for a call, made now if this mode may have a new one, and the call's tensors."""
        found = self._known.setdefault(mode, [])
        found += [self._bind(program, model) for program in self._unbound.pop(mode, ())]
        if not found and mode == self._planned:  # whatever is called first: it is there already, and all others follow
            found.append(self._bind(self._make(model, mode, args, kwargs), model))
        for bound in found:
            try:
                tensors = bound.flatten(args, kwargs)
            except InputMismatchError:
                continue
            if bound.expected.mismatch(tensors, grad=mode[1]) is None and bound.attributes.same():
                return bound, tensors
        if mode == self._planned:
            self._admit(found[0], args, kwargs)
        self._same_batch.look_again(model, args, kwargs)
        self._require_few(found)
        bound = self._bind(self._make(model, mode, args, kwargs), model)
        tensors = bound.flatten(args, kwargs)
        problem = bound.expected.mismatch(tensors, grad=mode[1])
        if problem is not None:
            raise problem
        for read, now in bound.attributes.changed():
            raise attribute_differs(read.name, read.value, now)
        found.append(bound)
        if len(found) == _MANY_FORMS:
            warn(many_forms(len(found), training=mode[0]))
        return bound, tensors

    def _admit(self, planned: Bound | StagedBound, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Tell, once, of a call of the planned mode that has other arguments than the planned one, or other shapes.

        Raises:
            InputMismatchError: it differs in something else.
        """
        differs: Exception | None
        try:
            tensors = planned.flatten(args, kwargs)
        except ArgumentsDifferError as error:
            differs = error
        else:
            differs = planned.expected.mismatch(tensors, grad=self._planned[1])
            if differs is None:
                differs = next(
                    (attribute_differs(r.name, r.value, now) for r, now in planned.attributes.changed()), None
                )
            if differs is None:
                return
            if not planned.expected.differ_in_form_alone(tensors, parts=self.part[1] > 1):
                raise differs
        if not self._told:
            self._told = True
            warn(other_form(str(differs)))

    def _make(
        self, model: nn.Module, mode: tuple[bool, bool], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Program | PipelinedProgram:
        """Return a new program, for a call of a model with the attributes that it has now."""
        if self._as_called is None:
            return self._program_for(*mode, args, kwargs)
        with self._as_called(changed(self._held, own_attributes(model), objects=not self._is_copy)):
            return self._program_for(*mode, args, kwargs)

    def _require_few(self, found: Sequence[Bound | StagedBound]) -> None:
        """Raise where there are many programs already, and now a number is another one than in all of them."""
        others = [next(bound.attributes.changed(), None) for bound in found]
        numbers = [each for each in others if each is not None and is_number(each[0].value) and is_number(each[1])]
        if len(found) >= _MANY_FORMS and len(numbers) == len(found):
            read, now = numbers[0]
            raise attribute_differs(read.name, read.value, now)

    def _bind(self, program: Program | PipelinedProgram, model: nn.Module) -> Bound | StagedBound:
        if isinstance(program, PipelinedProgram):
            if self.pipeline is None:
                raise RuntimeError("a program of several stages or micro-batches needs `pipeline`")
            return StagedBound(program, model, self.pipeline, **self._how)
        self.ranks.agree("order of collectives", _order(program))
        if self._profiler is not None:
            programs = (program.local.forward, program.local.backward_without(()))
            self._profiler.know(*(each for each in programs if each is not None))
        return Bound(program, model, self.groups, self.ranks, **self._how)


def _types(module: nn.Module) -> tuple[tuple[bool, str, torch.dtype], ...]:
    """Return the dtype of each parameter (true) and buffer (false) that a module itself holds, by name."""
    tables = ((True, module._parameters), (False, module._buffers))
    return tuple(
        (parameters, key, each.dtype) for parameters, table in tables for key, each in table.items() if each is not None
    )


def _part(mesh: Mesh, batch: Layout | None, rank: int) -> tuple[int, int]:
    """Return the number of a rank's part of the batch, and how many parts there are."""
    if batch is None:
        return 0, 1
    count = math.prod(axis.size for axis, p in zip(mesh.axes, batch, strict=True) if isinstance(p, Shard))
    return int(own_part(torch.arange(count), batch, mesh, rank)[0]), count


def input_part(model: nn.Module) -> tuple[int, int]:
    """Return which part of the global batch this rank brings to a call of a compiled model, and of how many.

    (0, 1) where every rank brings the whole: the default. For `torch.utils.data.DistributedSampler`: its `rank` and
    `num_replicas`.

    Raises:
        UsageError: the model is not compiled, or waits for its first call.
    """
    runner = runner_of(model)
    if runner is None:
        raise not_compiled(type(model).__name__)
    return runner.part


def runner_of(model: nn.Module) -> Runner | None:
    """Return what runs a compiled model; `None` for any other module, and for one that waits for its first call."""
    found: Runner | None = model.__dict__.get(RUNNER)
    return found


def _order(program: Program) -> str:
    """Return a digest of the collectives in the order in which a rank issues them: equal, or ranks would hang."""
    text = repr([(each.op, each.axis, each.bytes, each.inner) for each in program.local.emitted])
    return hashlib.sha256(text.encode()).hexdigest()


def compiled(
    model: nn.Module, runner: Runner, *, init_fn: InitFn | None = None, names: Collection[str] | None = None
) -> nn.Module:
    """Return a module with `model`'s structure and names whose forward is the runner's programs.

    Its parameters are on their ranks (see `parameters.place`), with `names` only these. `model` itself keeps its
    own structure and tensors. All ranks must call this.

    Raises:
        UsageError: parameters on meta without `init_fn`.
        StalePlanError: the plan knows other parameters.
    """
    with runner.ranks.together("place the model's parameters"):
        check(model, runner.decisions, init_fn)
    copied = without_own_calls(copy_tree(model, {}))
    dropped = place(copied, runner.decisions, runner.groups, runner.ranks, init_fn, names)
    copied.__class__ = compiled_class(type(model))  # type: ignore[arg-type]  # mypy: a module's type has a hash
    copied.__dict__[RUNNER] = runner
    runner.know_modes(model, copied)
    copied.__dict__[ELSEWHERE] = dropped
    if runner.pipeline is not None and runner.pipeline.depth > 1:
        told = runner.ranks.gather([slot.name for slot in slots(copied)])
        before = (rank for block in runner.pipeline.blocks[: runner.pipeline.index] for rank in block)
        runner.held_before = frozenset(name for rank in before for name in told[rank])
        mark_elsewhere(copied, model, told, dropped)
        if not any(each.requires_grad for each in copied.parameters()):
            warn(nothing_trained_here(runner.ranks.rank))
    runner.introduce(copied)
    return copied
