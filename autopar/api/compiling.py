"""`autopar.compile`: from the user's module to one that runs its share of the plan on every rank."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import nn

from autopar._torch import pytree
from autopar.api import Cluster, captured_for, plan_captured, plan_model, read_cluster
from autopar.api.planning import Planner, Program
from autopar.api.staging import Budget, blocks, depth, is_staged, on_stages, staged_program
from autopar.api.stale import require_fresh
from autopar.capture import Captured, batch_size
from autopar.capture.autocasting import AUTOCAST
from autopar.capture.recompute import recomputed
from autopar.errors import UsageError
from autopar.ir.plan import Decisions, Plan, Workload
from autopar.ir.plan_json import from_json, load, to_json
from autopar.ir.squeeze import squeeze
from autopar.options import OptionKeywords, PlanOptions, Precision
from autopar.progress import Progress, Silent
from autopar.report.exposed import plan_note
from autopar.rewrite import batch_axes, batch_layout, rewrite
from autopar.runtime import InitFn, Ranks, Runner, compiled
from autopar.runtime import Program as LocalProgram
from autopar.runtime.attributes import attributes_as
from autopar.runtime.checkpoints import keep_optimizer_states
from autopar.runtime.clipping import see_all_stages
from autopar.runtime.compiled_class import PREPARED
from autopar.runtime.copying import copy_tree, without_own_calls
from autopar.runtime.errors import compiled_already
from autopar.runtime.executable import compile_graph
from autopar.runtime.module import runner_of
from autopar.runtime.optimizers import try_optimizers
from autopar.runtime.pipeline_ranks import PipelineRanks
from autopar.runtime.profiling import StepProfiler, ranges
from autopar.runtime.staged_program import PipelinedProgram, names_on_rank
from autopar.runtime.step import Backend
from autopar.runtime.waiting import hold_whole, plain_copy, require_values, take_over
from autopar.runtime.whole import plain_arguments
from autopar.suggest import did_you_mean
from cost_models.cluster import ClusterSpec

PLAN_VARIABLE = "AUTOPAR_PLAN"
"""Environment variable by which `autopar run` names the plan file."""

PROFILE_VARIABLE = "AUTOPAR_PROFILE"
"""Environment variable by which `autopar run --profile` names the folder for measured timelines."""

_INPUTS = ("global", "local")
_OUTPUTS = ("parts", "whole")
_BACKENDS = ("eager", "inductor")
_FOLLOW_LIMIT_S = 20.0
"""Seconds that the search for another program than the planned one may take while a job waits."""


def compile(
    model: nn.Module,
    cluster: Cluster | None = None,
    *,
    cluster_spec: Cluster | None = None,
    example_inputs: tuple[Any, ...] | dict[str, Any] | None = None,
    plan: Plan | str | Path | None = None,
    init_fn: InitFn | None = None,
    inputs: Literal["global", "local"] = "global",
    outputs: Literal["parts", "whole"] = "parts",
    backend: Literal["eager", "inductor"] | Backend = "eager",
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    **options: Unpack[OptionKeywords],
) -> nn.Module:
    """Return `model` as a program sharded over all ranks, with the same call signature and parameter names.

    `example_inputs` is the global batch, a tuple or a dict; every rank passes the whole batch to every call
    and gets the global loss. Without it, planning waits for the first call. With `inputs="local"` every rank passes
    only its own part (`autopar.input_part` says which), for loaders that already split. Outputs that the plan splits
    are DTensors, with stages on the ranks that make them; with `outputs="whole"` they are gathered at every call,
    plain tensors on all ranks, as losses always are. `plan` (a `Plan` or a file;
    also the variable AUTOPAR_PLAN, which `autopar run` sets) replaces the search. Every rank gets rank 0's plan.
    `init_fn(module)` initialises modules whose parameters are on meta. Options are the fields of `autopar.PlanOptions`.

    Raises:
        AutoparError: what a user can cause, on all ranks.
    """
    if isinstance(backend, str):
        _require_known("backend", backend, _BACKENDS)
    _require_known("inputs", inputs, _INPUTS)
    _require_known("outputs", outputs, _OUTPUTS)
    if inputs == "local" and example_inputs is None:
        raise UsageError(
            'inputs="local" needs example_inputs, the global batch (its shapes; tensors on meta will do): what one '
            "rank brings does not say how the batch is split"
        )
    _require_plain(model)
    parsed = PlanOptions.parse(**options)
    given = _given_plan(plan)
    spec = (
        read_cluster(cluster, cluster_spec)
        if cluster is not None or cluster_spec is not None or given is None
        else None
    )
    ranks = Ranks.join(device or _device_type(spec))
    job = Job(
        model, spec, ranks, parsed, init_fn, backend, progress or Silent(), given, inputs == "local", outputs == "whole"
    )
    if example_inputs is not None:
        return job.build(job.capture(example_inputs, training=model.training))
    if given is not None:
        return job.build(None)
    return _lazy(model, job)


def _require_known(name: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        plural = name if name.endswith("s") else f"{name}s"
        raise UsageError(f"{name}={word!r} is unknown{did_you_mean(word, known)}; {plural} are {', '.join(known)}")


def _require_plain(model: nn.Module) -> None:
    """Raise unless it is a module that is not compiled, nor has a part that is."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if any(runner_of(each) is not None for each in model.modules()):
        raise compiled_already(type(model).__name__)


def _given_plan(plan: Plan | str | Path | None) -> Plan | None:
    if plan is None:
        named = os.environ.get(PLAN_VARIABLE)
        return load(named) if named else None
    return plan if isinstance(plan, Plan) else load(plan)


def _device_type(spec: ClusterSpec | None) -> str | None:
    if spec is None:
        return None
    return "cpu" if any(each.kind == "cpu" for each in spec.devices) else "cuda"


@dataclass
class Job:
    """One `compile`: what was asked for, and the plan once it exists."""

    model: nn.Module
    cluster: ClusterSpec | None
    ranks: Ranks
    options: PlanOptions
    init_fn: InitFn | None
    backend: str | Backend
    progress: Progress
    plan: Plan | None
    local: bool
    """Whether each rank brings its own part of the batch to a call."""

    whole_outputs: bool
    """Whether each rank gets all outputs, as plain tensors."""

    _split: tuple[str, ...] = field(init=False, default=())
    _captured: dict[tuple[bool, bool], Captured] = field(init=False, default_factory=dict)
    _ready: dict[tuple[bool, bool], PipelinedProgram] = field(init=False, default_factory=dict)
    _met: bool = field(init=False, default=False)
    """Whether the planned program was captured here: the plan is for this model, whatever else is called."""

    def capture(self, example_inputs: Any, *, training: bool, grad: bool = True) -> Captured:
        """Return the program for calls like the example; all ranks must have the same.

        Raises:
            RanksDisagreeError: they do not.
        """
        if self.plan is None and self.options.precision == "auto":
            self._choose_precision(example_inputs)
        with self.ranks.together("capture the model"):
            captured = captured_for(self.model, example_inputs, self._precision, training=training, with_backward=grad)
        self.ranks.agree("captured program", captured.graph.fingerprint)
        return captured

    def _choose_precision(self, example_inputs: Any) -> None:
        """Plan in every precision that may be chosen, on rank 0, and let all ranks know which it is."""
        chosen = ""
        with self.ranks.together("plan"):
            if self.ranks.rank == 0 and self.cluster is not None:
                cluster = self._cluster_of_job()
                self.plan = plan_model(self.model, cluster, example_inputs, self.options, self.progress)
                chosen = self.plan.workload.precision
        precision = PlanOptions.parse(precision=self.ranks.from_first(chosen)).precision
        self.options = replace(self.options, precision=precision)

    @property
    def _precision(self) -> Precision:
        planned = self.plan.workload.precision if self.plan is not None else self.options.precision
        return PlanOptions.parse(precision=planned).precision

    def build(self, captured: Captured | None) -> nn.Module:
        """Return the compiled module: planned for `captured`, or by the plan that was given."""
        plan = self._shared_plan(captured)
        self.plan = plan
        training = captured.training if captured is not None else True
        if captured is not None:
            self._captured[training, True] = captured
            self._met = True
        squeezed = squeeze(plan.decisions)
        if self.local and captured is not None:
            self._split = batch_axes(captured.graph, squeezed)
        pipeline = None
        if is_staged(squeezed):
            pipeline = PipelineRanks.of(squeezed.mesh, depth(squeezed), self.ranks, squeezed.levels, blocks(squeezed))
        names = None
        if pipeline is not None and pipeline.depth > 1:
            names = self._names_here(pipeline, training, captured)
        profiler = _profiler(self.ranks, plan)
        runner = Runner(
            plan.decisions,
            self.ranks,
            self._program_for,
            planned=(training, True),
            backend=_backend(self.backend, profiled=profiler is not None),
            batch=batch_layout(squeezed.mesh, self._split) if self._split else None,
            pipeline=pipeline,
            profiler=profiler,
            autocast=self._autocast(plan),
            whole_outputs=self.whole_outputs,
            introduce=(see_all_stages, keep_optimizer_states, try_optimizers),
            as_called=functools.partial(attributes_as, self.model),
        )
        return compiled(self.model, runner, init_fn=self.init_fn, names=names)

    def _autocast(self, plan: Plan) -> torch.dtype | None:
        """Return the type to which the plan's programs cast; `None` if they do not."""
        if plan.workload.precision != "fp32":
            return AUTOCAST[plan.workload.precision]
        kind = self.ranks.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _names_here(self, pipeline: PipelineRanks, training: bool, captured: Captured | None) -> Collection[str]:
        """Return the parameters and buffers of this rank's stages, whose program is made for that and kept.

        Raises:
            UsageError: there is no example batch to make it from.
        """
        if captured is None:
            raise UsageError(
                "a plan with pipeline stages needs example_inputs: the program says which parameters a rank holds"
            )
        program = self._program_for(training, True, (), {})
        if not isinstance(program, PipelinedProgram):
            raise RuntimeError("a plan with pipeline stages made a program without")
        self._ready[training, True] = program
        return names_on_rank(program.staged, program.placeholders, program.schedule, pipeline.index, self.model)

    def _shared_plan(self, captured: Captured | None) -> Plan:
        """Return rank 0's plan, searched or given, checked against the program."""
        text = ""
        with self.ranks.together("plan"):
            if self.ranks.rank == 0:
                if self.plan is None and captured is not None and self.cluster is not None:
                    name = type(self.model).__name__
                    self.plan = plan_captured(captured, name, self._cluster_of_job(), self.options, self.progress)
                if self.plan is None:
                    raise UsageError("there is neither a plan nor an example batch to make one from")
                text = to_json(self.plan)
        plan = from_json(self.ranks.from_first(text), "rank 0's plan")
        with self.ranks.together("check the plan"):
            if depth(plan.decisions) == 1:
                self.ranks.require(plan.decisions.mesh)
            if captured is not None:
                require_fresh(plan, captured.graph, _torch_version(), self.cluster)
        return plan

    def _cluster_of_job(self) -> ClusterSpec:
        """Return the cluster, which must have as many devices as there are ranks."""
        spec = self.cluster
        if spec is None:
            raise UsageError("no cluster given")
        if spec.device_count != self.ranks.world_size:
            running, planned = self.ranks.world_size, spec.device_count
            of_nodes = sorted({group.node.count for group in spec.groups})
            per_node = " or ".join(map(str, of_nodes)) + (", as many as the node has," if len(of_nodes) > 1 else "")
            raise UsageError(
                f"cluster {spec.name!r} has {planned} devices but {running} rank{'s are' if running > 1 else ' is'} "
                f"running; start the script with torchrun --nproc-per-node {per_node}"
                f"{f' --nnodes {spec.node_count}' if spec.node_count > 1 else ''}, or give a cluster of {running}"
            )
        return spec

    def _program_for(
        self, training: bool, grad: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LocalProgram | PipelinedProgram:
        ready = self._ready.pop((training, grad), None)
        if ready is not None:
            return ready
        captured = self._captured.pop((training, grad), None)
        if captured is None:
            example = _as_example(*self._globally(args, kwargs))
            captured = self.capture(example, training=training, grad=grad)
        plan = self.plan
        if plan is None:
            raise RuntimeError("programs are asked for after planning")
        decisions = plan.decisions
        if captured.graph.fingerprint == plan.fingerprint.graph:
            self._met = True
        elif training and grad and not self._met:
            require_fresh(plan, captured.graph, _torch_version())
        else:
            decisions = on_stages(self._follow(plan, captured, trains=training and grad), plan.decisions)
        with self.ranks.together("rewrite the program"):
            if decisions.recompute:
                captured = recomputed(captured, decisions.recompute)
            if is_staged(decisions):
                return staged_program(
                    captured,
                    decisions,
                    self.ranks.rank,
                    split=self._split,
                    device=self.ranks.device.type,
                    budget=_budget(plan, self.ranks.rank) if training and grad else None,
                )
            programs = rewrite(
                captured.joint,
                captured.graph,
                decisions,
                self.ranks.rank,
                split=self._split,
                device=self.ranks.device.type,
            )
        return LocalProgram(captured.call, captured.result, captured.placeholders, captured.constants, programs)

    def _globally(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return a call with tensors of the global batch's shape in place of this rank's part; values do not matter."""
        if not self._split or self.plan is None:
            return args, kwargs
        parts = math.prod(axis.size for axis in self.plan.decisions.mesh.axes if axis.name in self._split)
        batch = batch_size(each.shape for each in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(each))

        def whole(each: Any) -> Any:
            if not torch.is_tensor(each) or not each.dim() or each.shape[0] != batch:
                return each
            return each.new_empty((batch * parts, *each.shape[1:]))

        found: tuple[tuple[Any, ...], Mapping[str, Any]] = pytree.tree_map(whole, (args, dict(kwargs)))
        return found

    def _follow(self, plan: Plan, captured: Captured, *, trains: bool) -> Decisions:
        """Return rank 0's decisions for another program of the model, its parameters where the plan has them.

        One that trains recomputes what the plan does, in micro-batches no larger than the plan's.
        """
        found: Decisions | None = None
        known, workload = plan.decisions, plan.workload
        count = _microbatches(workload, captured.graph.batch_size) if trains else 1
        doing = "another form of batch" if trains else "evaluation"
        with self.ranks.together(f"plan the program for {doing}"):
            if self.ranks.rank == 0:
                spec = self.cluster or ClusterSpec.from_dict(plan.cluster)
                program = Program(captured.graph, workload.model, _torch_version())
                options = PlanOptions(
                    precision=self._precision,
                    reduce_dtype=PlanOptions.parse(reduce_dtype=plan.constraints.get("reduce_dtype")).reduce_dtype,
                    optimizer=PlanOptions.parse(optimizer=workload.optimizer if trains else "none").optimizer,
                    time_limit=_FOLLOW_LIMIT_S,
                    memory_margin=1.0 - depth(known),  # all stages go through the ranks of one of them
                    two_level=False,  # there are process groups for what the training program issues only
                )
                kept = known if trains else replace(known, recompute={})
                found = Planner(program, spec, options, Silent()).follow(kept, microbatches=count)
                found = replace(found, outputs_dropped=known.outputs_dropped if trains else ())
        shared: Decisions = self.ranks.from_first(found)
        return shared


def _microbatches(planned: Workload, batch: int) -> int:
    """Return in how many micro-batches another batch is to go: of as many samples as the plan's, or fewer.

    In parts for all data-parallel ranks, if it divides so.
    """
    rows = max(1, planned.global_batch // planned.num_microbatches)
    counts = [count for count in range(1, batch + 1) if batch % count == 0 and batch // count <= rows]
    replicas = max(1, rows // max(1, planned.microbatch))
    even = [count for count in counts if (batch // count) % replicas == 0]
    return min(even or counts, default=1)


def _budget(plan: Plan, rank: int) -> Budget:
    """Return what a rank may hold by the plan."""
    estimates = plan.estimates
    mine = {stage.index for stage in plan.decisions.stages if rank in stage.ranks}
    of_stage = [each.memory_budget_bytes for each in estimates.per_stage if each.index in mine]
    budget_bytes = max(of_stage, default=0) or estimates.memory_budget_bytes
    return Budget(budget_bytes, estimates.memory.reserved, plan.workload.optimizer)


def _as_example(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a call's arguments in the form that capture takes."""
    if args and kwargs:
        from autopar.capture import CallArguments

        return CallArguments(args, dict(kwargs))
    return dict(kwargs) if kwargs else args


def _profiler(ranks: Ranks, plan: Plan) -> StepProfiler | None:
    """Return what measures the steps of this run, if `autopar run --profile` asked for it."""
    folder = os.environ.get(PROFILE_VARIABLE)
    return StepProfiler(Path(folder), ranks.rank, ranks.device, plan_note(plan)) if folder else None


def _backend(name: str | Backend, *, profiled: bool) -> Any:
    if not isinstance(name, str):
        return name
    if name == "eager":
        return functools.partial(compile_graph, ranges=ranges) if profiled else None
    if profiled:
        raise UsageError(
            f"backend={name!r} cannot be profiled: it fuses operators, and collectives have no place of their own in "
            'what it makes; compile with backend="eager", or run without --profile'
        )
    from autopar.runtime.executable import inductor_graph

    return inductor_graph


def _torch_version() -> str:
    return torch.__version__.partition("+")[0]


def _lazy(model: nn.Module, job: Job) -> nn.Module:
    """Return a copy of the module that plans at its first call; an optimizer made before keeps its parameters.

    On several ranks the parameters are DTensors from the start, whole on every rank: such an object can later
    take over a sharded one's contents, which a plain parameter cannot.
    """
    waiting = without_own_calls(copy_tree(model, {}))
    kind = type(model)
    if job.ranks.world_size > 1:
        with job.ranks.together("hold the parameters until the first call"):
            require_values(model)
        hold_whole(waiting, job.ranks)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = plain_arguments(args, kwargs)
        job.model = plain_copy(self, model)
        built = job.build(job.capture(_as_example(args, kwargs), training=self.training))
        take_over(self, built)
        see_all_stages(self)
        self.__class__ = built.__class__
        return self.forward(*args, **kwargs)

    own = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__, PREPARED: True}
    lazy = type(kind.__name__, (kind,), own)
    waiting.__class__ = lazy
    try_optimizers(waiting)
    return waiting
