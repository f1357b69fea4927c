"""A captured program and its plan to what one rank of a pipeline runs, or one that adds up over micro-batches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from autopar.capture import Captured
from autopar.costs.liveness import local_bytes
from autopar.costs.optimizer import state_bytes
from autopar.ir.graph import Graph
from autopar.ir.mesh import MICROBATCH, TIME, Axis, Mesh
from autopar.ir.pipeline import Edge, PipelineCosts, StageCost
from autopar.ir.placement import Replicate
from autopar.ir.plan import Decisions
from autopar.ir.schedule import PipelineSchedule
from autopar.ir.squeeze import squeeze
from autopar.ir.stages import stage_of
from autopar.rewrite import Value, held, rewrite_stages, split_inputs
from autopar.rewrite.staged import StagedPrograms
from autopar.runtime.staged_program import PipelinedProgram
from autopar.simulate.check import check
from autopar.simulate.generators import generate


def is_staged(decisions: Decisions) -> bool:
    """Return whether a step has several stages or micro-batches."""
    return len(decisions.stages) > 1 or decisions.schedule.num_microbatches > 1


def depth(decisions: Decisions) -> int:
    """Return how many pipeline ranks there are: meshes that hold different stages."""
    return max(1, len({stage.ranks for stage in decisions.stages}))


def blocks(decisions: Decisions) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each pipeline rank, which share its stages; without stages, all of them."""
    if depth(decisions) == 1:
        return (tuple(range(decisions.mesh.world_size)),)
    ranks = dict(zip(schedule_of(decisions).rank_of, (stage.ranks for stage in decisions.stages), strict=True))
    return tuple(ranks[index] for index in sorted(ranks))


def on_stages(found: Decisions, planned: Decisions) -> Decisions:
    """Return the decisions of another program of the planned model, on the stages of the planned one."""
    if len(planned.stages) == 1:
        return found
    count = found.schedule.num_microbatches
    return replace(found, stages=planned.stages, schedule=replace(planned.schedule, num_microbatches=count))


def schedule_of(decisions: Decisions) -> PipelineSchedule:
    """Return what every pipeline rank does in a step; without stages, micro-batch after micro-batch."""
    schedule = decisions.schedule
    name = "1f1b" if schedule.name == "none" else schedule.name
    return generate(
        name,
        ranks=depth(decisions),
        microbatches=schedule.num_microbatches // schedule.batch_overlap,
        interleave=schedule.interleave,
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """What a rank may hold while it trains."""

    budget_bytes: int
    reserved_bytes: int
    """Of these, what the device takes for itself."""

    optimizer: str


def staged_program(
    captured: Captured,
    decisions: Decisions,
    rank: int,
    *,
    split: Collection[str],
    device: str,
    budget: Budget | None = None,
) -> PipelinedProgram:
    """Return what `rank` runs for calls like the captured one, which bring their parts along the axes `split`.

    With a budget, what the programs hold from action to action is held against it.

    Raises:
        RewriteError: an operator does not fit the layouts that the plan gives it.
        InfeasibleError: the program cannot be cut so.
        ScheduleError: ranks would wait for one another forever, or this one's buffers are over the budget.
    """
    graph, decisions = captured.graph, squeeze(decisions)
    mesh, schedule = decisions.mesh, schedule_of(decisions)
    index, inner = next((at, each.index(rank)) for at, each in enumerate(blocks(decisions)) if rank in each)
    if len(decisions.stages) > 1:
        homes = stage_of(graph, [stage.blocks for stage in decisions.stages])
    else:
        homes = dict.fromkeys((op.name for op in graph.ops), 0)
    mine = [stage for stage, at in enumerate(schedule.rank_of) if at == index]
    halved = any(action.kind == "W" for row in schedule.actions for action in row)
    staged = rewrite_stages(
        captured.joint, graph, decisions, inner, homes, mine, split=split, split_backward=halved, device=device
    )
    # Before anything is sent.
    costs = _held_bytes(graph, decisions, staged, schedule, budget)
    check(schedule, costs=costs, budget_bytes=None if budget is None else budget.budget_bytes)
    brought = split_inputs(graph, mesh, split)
    in_time = Mesh((Axis(MICROBATCH, decisions.schedule.num_microbatches, TIME),))
    whole = (Replicate(),) * len(mesh.axes)
    inputs = [op for op in graph.ops if op.kind == "input"]
    outputs = {each.name: each for each in graph.outputs if each.kind == "output"}
    return PipelinedProgram(
        call=captured.call,
        result=captured.result,
        placeholders=captured.placeholders,
        constants=captured.constants,
        staged=staged,
        schedule=schedule,
        batch_overlap=decisions.schedule.batch_overlap,
        inputs=tuple(Value(op.name, op.outputs[0], brought.get(op.name, whole)) for op in inputs),
        split_inputs=tuple(split_inputs(graph, in_time, (MICROBATCH,))),
        outputs=tuple(
            Value(name, graph.meta(ref), decisions.outputs[name]) if ref is not None else Value(name, None, ())
            for name, ref in ((name, outputs[name].ref) for name, _ in staged.outputs)
        ),
        trained=frozenset(each.name for each in graph.outputs if each.kind == "gradient"),
        seeding=staged.seeding,
    )


def _held_bytes(
    graph: Graph, decisions: Decisions, staged: StagedPrograms, schedule: PipelineSchedule, budget: Budget | None
) -> PipelineCosts:
    """Return what the stages of a rank hold, as their programs say; other ranks' stages, and seconds, are 0."""
    sizes = decisions.mesh.sizes
    stages = [StageCost(forward_s=0.0, input_gradient_s=0.0, weight_gradient_s=0.0)] * schedule.stages
    found: set[str] = set()
    for stage, program in staged.stages.items():
        takes = (*program.takes, *program.backward_takes, *program.weights_takes)
        mine = {*(item.name for item in takes if item.kind == "start"), *program.begin_takes} - found
        found |= mine
        buffers = held(program, staged.transfers)
        static = float(buffers.gradients + buffers.whole)
        if budget is not None and stage == min(staged.stages):
            static += budget.reserved_bytes
        for name in mine:
            op = graph.by_name.get(name)
            if op is not None and op.kind in {"parameter", "buffer"}:
                layout = decisions.parameters[op.target].placements
                static += sum(local_bytes(meta, layout, sizes) for meta in op.outputs if meta is not None)
                if op.requires_grad and budget is not None:
                    static += state_bytes(op, layout, sizes, budget.optimizer)
        stages[stage] = replace(
            stages[stage],
            static_bytes=round(static),
            activation_bytes=buffers.activations,
            kept_bytes=buffers.kept,
        )
    pairs = {(stage, stage + 1) for stage in range(schedule.stages - 1)}
    pairs |= {(each.source, each.target) for each in staged.transfers if each.target > each.source + 1}
    return PipelineCosts(tuple(stages), tuple(Edge(*pair, 0.0, 0.0) for pair in sorted(pairs)))
