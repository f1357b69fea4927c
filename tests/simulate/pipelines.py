"""Pipelines with equal stages, as several tests of this folder use them."""

from __future__ import annotations

from autopar.ir.pipeline import Edge, PipelineCosts, StageCost, equal_stages
from autopar.ir.schedule import Action, PipelineSchedule
from autopar.ir.timeline import Timeline
from autopar.simulate.engine import simulate
from autopar.simulate.generators import generate, named

UNIT_BYTES = 840  # of one micro-batch on one rank; whole for any number of stages a rank up to 8


def rank_costs(
    ranks: int,
    interleave: int = 1,
    *,
    f: float = 1.0,
    i: float = 1.0,
    w: float = 1.0,
    transfer_s: float = 0.0,
    skips: tuple[Edge, ...] = (),
) -> PipelineCosts:
    """Costs of equal ranks: f, i and w are seconds of all stages of one rank together."""
    stage = StageCost(
        forward_s=f / interleave,
        input_gradient_s=i / interleave,
        weight_gradient_s=w / interleave,
        activation_bytes=UNIT_BYTES // interleave,
        kept_bytes=UNIT_BYTES // interleave,
    )
    return equal_stages(ranks * interleave, stage, forward_s=transfer_s, backward_s=transfer_s, skips=skips)


def run(name: str, ranks: int, microbatches: int, interleave: int | None = None, **seconds: float) -> Timeline:
    """Timeline of a named schedule on equal ranks."""
    schedule = generate(name, ranks=ranks, microbatches=microbatches, interleave=interleave)
    return simulate(schedule, rank_costs(ranks, schedule.stages // ranks, **seconds))


def interleaves(name: str) -> tuple[int, ...]:
    """Numbers of stages a rank to try."""
    fixed = named(name).interleave
    return (fixed,) if fixed else (1, 2, 3, 4)


def rows(*texts: str) -> PipelineSchedule:
    """Schedule of rows of cells parted by spaces."""
    return PipelineSchedule.from_csv("".join(",".join(text.split()) + "\n" for text in texts))


def without(schedule: PipelineSchedule, cell: str) -> PipelineSchedule:
    """The schedule with one action dropped."""
    gone = Action.parse(cell)
    actions = tuple(tuple(each for each in row if each != gone) for row in schedule.actions)
    return PipelineSchedule(schedule.rank_of, schedule.microbatches, actions, schedule.name)


def swapped(schedule: PipelineSchedule, one: str, other: str) -> PipelineSchedule:
    """The schedule with two actions in each other's place."""
    a, b = Action.parse(one), Action.parse(other)
    actions = tuple(tuple({a: b, b: a}.get(each, each) for each in row) for row in schedule.actions)
    return PipelineSchedule(schedule.rank_of, schedule.microbatches, actions, schedule.name)
