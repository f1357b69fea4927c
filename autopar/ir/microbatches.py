"""Micro-batches as a leading mesh axis in time: decisions with it, for the rewriter, and without, for everyone else.

Along time the batch is split as along a data-parallel axis, outside of every other split of its digit. What an operator
does there is the `time` of its decision; layouts and meshes in a plan are those of one micro-batch on the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeGuard

from autopar.ir.mesh import MICROBATCH, TIME, Axis, Mesh
from autopar.ir.placement import Layout, Placement, Replicate, Shard
from autopar.ir.plan import Decisions, OperatorDecision
from autopar.ir.strategy import MeshStrategy, Strategy

OWN = "own"
"""Lowering of an operator that a micro-batch, or a rank, does on its own rows as if they were all there are."""


def joined(time: Placement, layout: Layout, count: int) -> Layout:
    """Return the layout over time and ranks of what lies in `layout` within each of `count` micro-batches."""
    return (time, *(dataclasses.replace(p, outer=p.outer * count) if _inside(p, time, 1) else p for p in layout))


def parted(layout: Layout, count: int) -> tuple[Placement, Layout]:
    """Return what `joined` was given: the placement along time, and the layout within a micro-batch."""
    return _parted(layout, 0, count)


def _parted(layout: Layout, axis: int, count: int) -> tuple[Placement, Layout]:
    mine, others = layout[axis], (*layout[:axis], *layout[axis + 1 :])
    inside = (dataclasses.replace(p, outer=p.outer // count) if _inside(p, mine, count) else p for p in others)
    return mine, tuple(inside)


def within(strategy: MeshStrategy, count: int, axis: int = 0) -> tuple[Strategy, MeshStrategy]:
    """Return what an operator does along an axis of `count` parts of the batch, and on the other axes within one.

    Axis 0 is that of the micro-batches where a mesh has time.
    """
    return strategy.axes[axis], MeshStrategy(
        axes=(*strategy.axes[:axis], *strategy.axes[axis + 1 :]),
        inputs=tuple(_parted(each, axis, count)[1] for each in strategy.inputs),
        outputs=tuple(None if each is None else _parted(each, axis, count)[1] for each in strategy.outputs),
    )


def with_time(decisions: Decisions) -> Decisions:
    """Return the decisions on a mesh whose first axis is that of the micro-batches; themselves if there is but one."""
    count = decisions.schedule.num_microbatches
    if count == 1:
        return decisions
    return dataclasses.replace(
        decisions,
        mesh=Mesh((Axis(MICROBATCH, count, TIME), *decisions.mesh.axes)),
        parameters={
            name: dataclasses.replace(each, placements=joined(Replicate(), each.placements, count))
            for name, each in decisions.parameters.items()
        },
        operators={name: _operator(each, count) for name, each in decisions.operators.items()},
        outputs={name: joined(decisions.outputs_in_time[name], at, count) for name, at in decisions.outputs.items()},
    )


def _operator(decision: OperatorDecision, count: int) -> OperatorDecision:
    time, old = decision.time, decision.strategy
    if time is None:
        raise ValueError(f"the plan has {count} micro-batches, and does not say what {decision.target} does with them")
    strategy = MeshStrategy(
        axes=(time, *old.axes),
        inputs=_over(time.inputs, old.inputs, count),
        outputs=tuple(
            None if at is None or each is None else joined(at, each, count)
            for at, each in zip(time.outputs, old.outputs, strict=True)
        ),
    )
    return dataclasses.replace(decision, strategy=strategy)


def _over(time: Sequence[Placement], layouts: Sequence[Layout], count: int) -> tuple[Layout, ...]:
    return tuple(joined(at, each, count) for at, each in zip(time, layouts, strict=True))


def _inside(placement: Placement, time: Placement, count: int) -> TypeGuard[Shard]:
    """Return whether a shard of a tensor with `count` micro-batches splits runs of what each of them has.

    It does not where its digit is of another dimension, or further out: the sequence of `[sequence, batch]` merged.
    """
    if not isinstance(placement, Shard) or not isinstance(time, Shard) or placement.dim != time.dim:
        return False
    return placement.outer >= time.outer * count
