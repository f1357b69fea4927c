"""A captured program and its plan to what one rank of a pipeline runs, or one that adds up over micro-batches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod

from autopar.capture import Captured
from autopar.ir.mesh import MICROBATCH, TIME, Axis, Mesh
from autopar.ir.placement import Replicate
from autopar.ir.plan import Decisions
from autopar.ir.schedule import PipelineSchedule
from autopar.ir.squeeze import squeeze
from autopar.ir.stages import stage_of
from autopar.rewrite import Value, rewrite_stages, split_inputs
from autopar.runtime.staged_program import PipelinedProgram
from autopar.simulate.check import check
from autopar.simulate.generators import generate


def is_staged(decisions: Decisions) -> bool:
    """Return whether a step has several stages or micro-batches."""
    return len(decisions.stages) > 1 or decisions.schedule.num_microbatches > 1


def depth(decisions: Decisions) -> int:
    """Return how many pipeline ranks there are: meshes that hold different stages."""
    return max(1, len({stage.ranks for stage in decisions.stages}))


def evaluated(found: Decisions, planned: Decisions) -> Decisions:
    """Return the decisions of an evaluation program on the stages of the planned one: the batch goes through whole."""
    if len(planned.stages) == 1:
        return found
    return replace(found, stages=planned.stages, schedule=replace(planned.schedule, num_microbatches=1))


def schedule_of(decisions: Decisions) -> PipelineSchedule:
    """Return what every pipeline rank does in a step; without stages, micro-batch after micro-batch."""
    schedule = decisions.schedule
    name = "1f1b" if schedule.name == "none" else schedule.name
    return generate(
        name, ranks=depth(decisions), microbatches=schedule.num_microbatches, interleave=schedule.interleave
    )


def staged_program(
    captured: Captured, decisions: Decisions, rank: int, *, split: Collection[str], device: str
) -> PipelinedProgram:
    """Return what `rank` runs for calls like the captured one, which bring their parts along the axes `split`.

    Raises:
        RewriteError: an operator does not fit the layouts that the plan gives it.
        InfeasibleError: the program cannot be cut so.
        ScheduleError: ranks would wait for one another forever.
    """
    graph, decisions = captured.graph, squeeze(decisions)
    mesh, schedule = decisions.mesh, schedule_of(decisions)
    width = prod(mesh.sizes)
    index, inner = divmod(rank, width)
    if len(decisions.stages) > 1:
        homes = stage_of(graph, [stage.blocks for stage in decisions.stages])
    else:
        homes = dict.fromkeys((op.name for op in graph.ops), 0)
    mine = [stage for stage, at in enumerate(schedule.rank_of) if at == index]
    halved = any(action.kind == "W" for row in schedule.actions for action in row)
    staged = rewrite_stages(
        captured.joint, graph, decisions, inner, homes, mine, split=split, split_backward=halved, device=device
    )
    skips = {(each.source, each.target) for each in staged.transfers if each.target > each.source + 1}
    check(schedule, skips=sorted(skips))  # before anything is sent
    brought = split_inputs(graph, mesh, split)
    in_time = Mesh((Axis(MICROBATCH, schedule.microbatches, TIME),))
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
        inputs=tuple(Value(op.name, op.outputs[0], brought.get(op.name, whole)) for op in inputs),
        split_inputs=tuple(split_inputs(graph, in_time, (MICROBATCH,))),
        outputs=tuple(
            Value(name, graph.meta(ref), decisions.outputs[name]) if ref is not None else Value(name, None, ())
            for name, ref in ((name, outputs[name].ref) for name, _ in staged.outputs)
        ),
        trained=frozenset(each.name for each in graph.outputs if each.kind == "gradient"),
        seeding=staged.seeding,
    )
