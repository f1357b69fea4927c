"""From the captured program and the plan's decisions to one rank's forward and backward programs.

    programs = rewrite(captured.joint, captured.graph, plan.decisions, rank)

Nothing is decided here: layouts are the plan's, the collectives between them
`ir.reshard`'s. The passes are those of the two tuples below, then of `programs.LAST`, in order.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autopar.ir.graph import Graph, Ref
from autopar.ir.mesh import MICROBATCH
from autopar.ir.microbatches import with_time
from autopar.ir.placement import Layout
from autopar.ir.plan import Decisions
from autopar.ir.squeeze import squeeze
from autopar.rewrite.buckets import MergeReductions
from autopar.rewrite.device import passes_for
from autopar.rewrite.emitted import emitted
from autopar.rewrite.errors import RewriteError
from autopar.rewrite.inputs import batch_axes, batch_layout
from autopar.rewrite.microbatches import Totals, settle
from autopar.rewrite.partition import copied, partition
from autopar.rewrite.passes import Applied, Pass, run_passes
from autopar.rewrite.programs import LAST, Emitted, Programs, Saved, Value
from autopar.rewrite.schedule import IssueEarly, PrefetchGathers, SinkWaits
from autopar.rewrite.shapes import propagate
from autopar.rewrite.simplify import DropIdentities, DropUnreadStatistics, MergeEqualViews, ViewWhatCanBeViewed
from autopar.rewrite.spmd import Localiser

__all__ = [
    "Applied",
    "Emitted",
    "Programs",
    "RewriteError",
    "Saved",
    "Totals",
    "Value",
    "batch_axes",
    "batch_layout",
    "localised",
    "rewrite",
]

_LOCAL: tuple[Pass, ...] = (
    DropIdentities(),
    ViewWhatCanBeViewed(),
    MergeEqualViews(),
    DropUnreadStatistics(),
)
"""On the whole local program."""

_PHASE: tuple[Pass, ...] = (
    IssueEarly(),
    SinkWaits(),
    PrefetchGathers(ahead_bytes=64 << 20),
)
"""On forward and on backward, each by itself."""


def localised(
    joint: fx.GraphModule,
    graph: Graph,
    decisions: Decisions,
    rank: int,
    *,
    split: Collection[str] = (),
    device: str = "cpu",
) -> tuple[fx.GraphModule, Totals | None]:
    """Return `rank`'s program for one micro-batch, forward and backward together, and what is summed over all first.

    Its placeholders are those of `joint` on the shapes of a micro-batch, then those of the sums; its results are beside
    `graph.outputs`, each the micro-batch's term or part.

    Raises:
        RewriteError: an operator does not fit the layouts that the plan gives it, or needs all micro-batches at once.
    """
    decisions = with_time(squeeze(decisions))
    _, gm, _ = _localised(joint, graph, decisions, rank, (MICROBATCH, *split), device)
    return gm, settle(gm, graph)


def _localised(
    joint: fx.GraphModule, graph: Graph, decisions: Decisions, rank: int, split: Collection[str], device: str
) -> tuple[Localiser, fx.GraphModule, list[Applied]]:
    """Return one rank's program, forward and backward together, with what made it and the passes run on it."""
    localiser = Localiser(joint, graph, decisions, rank, split)
    gm = localiser.run()
    gm.graph.lint()
    propagate(gm, {op.name: op.where for op in graph.ops}, by="localise")
    return localiser, gm, list(run_passes(gm, (*passes_for(device), *_LOCAL)))


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
    localiser, gm, applied = _localised(joint, graph, decisions, rank, split, device)
    cut = partition(gm, graph)
    for phase in (cut.forward, cut.backward):
        if phase is not None:
            applied += run_passes(phase, _PHASE)
    draft = None if cut.backward is None else fx.GraphModule(cut.backward, copied(cut.backward.graph))
    if cut.backward is not None:
        applied += run_passes(cut.backward, (MergeReductions(decisions.buckets),))
    for phase in (cut.forward, cut.backward):
        if phase is not None:
            applied += run_passes(phase, LAST)
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
