"""From the captured program and the plan's decisions to one rank's forward and backward programs.

    programs = rewrite(captured.joint, captured.graph, plan.decisions, rank)

Nothing is decided here: layouts are the plan's, the collectives between them
`ir.reshard`'s. The passes are those of `local`, of `overlap_passes`, then of `programs.LAST`, in order.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autopar._torch import LazyGraphModule
from autopar.ir.graph import Graph, Ref
from autopar.ir.placement import Layout
from autopar.ir.plan import Decisions
from autopar.ir.squeeze import squeeze
from autopar.rewrite.buckets import MergeCollectives
from autopar.rewrite.emitted import emitted
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.inputs import batch_axes, batch_layout, split_inputs
from autopar.rewrite.local import SPMD, local_program, localised
from autopar.rewrite.microbatches import Totals, cuts_in_time, require_alike
from autopar.rewrite.naming import AssignStreams
from autopar.rewrite.partition import copied, partition
from autopar.rewrite.passes import Applied, Pass, run_passes
from autopar.rewrite.programs import LAST, Emitted, Programs, Saved, Value
from autopar.rewrite.schedule import Defer, IssueAhead, SettleScatters, SinkWaits
from autopar.rewrite.stage_bytes import Held, held
from autopar.rewrite.stage_partition import rewrite_stages
from autopar.rewrite.two_level import RunInLevels, in_two_levels

__all__ = [
    "Applied",
    "Emitted",
    "Held",
    "Programs",
    "RewriteError",
    "Saved",
    "Totals",
    "Value",
    "batch_axes",
    "batch_layout",
    "cuts_in_time",
    "held",
    "localised",
    "require_alike",
    "rewrite",
    "rewrite_stages",
    "split_inputs",
]


def overlap_passes(decisions: Decisions, phase: str) -> tuple[Pass, ...]:
    """Return the passes by which a phase's collectives run beside its computation, as the plan decided."""
    return (
        MergeCollectives(tuple(each for each in decisions.buckets if each.phase == phase)),
        IssueAhead(tuple(each for each in decisions.ahead if each.phase == phase)),
        Defer(decisions.deferred),
        SinkWaits(),
        SettleScatters(),
        AssignStreams(decisions.streams),
        RunInLevels(in_two_levels(decisions.collectives)),
    )


def rewrite(
    joint: fx.GraphModule,
    graph: Graph,
    decisions: Decisions,
    rank: int,
    *,
    split: Collection[str] = (),
    device: str = "cpu",
) -> Programs:
    """Return the programs of `rank` under the plan's decisions, for a type of device.

    Every rank brings the global batch to a call, or its own part of it along the mesh axes `split`.

    Raises:
        RewriteError: an operator does not fit the layouts that the plan gives it.
    """
    decisions = squeeze(decisions)
    gm, localiser, made = local_program(joint, graph, decisions, rank, split, device)
    applied = list(made)
    cut = partition(gm, graph)
    for phase in (cut.forward, cut.backward):
        if phase is not None:
            applied += run_passes(phase, SPMD)
    draft = None if cut.backward is None else LazyGraphModule(cut.backward, copied(cut.backward.graph))
    for name, phase in (("forward", cut.forward), ("backward", cut.backward)):
        if phase is not None:
            applied += run_passes(phase, (*overlap_passes(decisions, name), *LAST))
    axes = {axis.name for axis in decisions.mesh.axes}
    issued = [*emitted(cut.forward, axes), *(emitted(cut.backward, axes) if cut.backward is not None else ())]

    def value(name: str, ref: Ref | None, layout: Layout | None = None) -> Value:
        if ref is None:
            return Value(name, None, ())
        return Value(name, graph.meta(ref), localiser.layout(ref) if layout is None else layout)

    results = graph.outputs
    return Programs(
        forward=cut.forward,
        backward=cut.backward,
        inputs=tuple(value(op.name, Ref(op.name)) for op in graph.ops if op.kind not in {"call", "tangent"}),
        outputs=tuple(value(o.name, o.ref, decisions.outputs.get(o.name)) for o in results if o.kind == "output"),
        mutations=tuple(value(o.name, Ref(o.name)) for o in results if o.kind == "mutation"),
        saved=cut.saved,
        draft=draft,
        tangents=tuple(value(op.name, Ref(op.name)) for op in graph.ops if op.kind == "tangent"),
        gradients=tuple(value(o.name, o.ref and Ref(o.name)) for o in results if o.kind == "gradient"),
        emitted=tuple(issued),
        applied=tuple(str(each) for each in applied if each.changes),
    )
