"""One rank's local program, forward and backward together, before it is cut."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autopar.ir.graph import Graph
from autopar.ir.mesh import MICROBATCH
from autopar.ir.microbatches import with_time
from autopar.ir.plan import Decisions
from autopar.ir.reshard import AHEAD_BYTES
from autopar.ir.squeeze import squeeze
from autopar.rewrite.device import kernels_for, places_for
from autopar.rewrite.microbatches import Totals, settle
from autopar.rewrite.passes import Applied, Pass, run_passes
from autopar.rewrite.schedule import IssueEarly, PrefetchGathers, SinkWaits
from autopar.rewrite.shapes import propagate
from autopar.rewrite.simplify import DropIdentities, DropUnreadStatistics, MergeEqualViews, ViewWhatCanBeViewed
from autopar.rewrite.spmd import Localiser

_LOCAL: tuple[Pass, ...] = (
    DropIdentities(),
    ViewWhatCanBeViewed(),
    MergeEqualViews(),
    DropUnreadStatistics(),
)
"""On the whole local program."""

SPMD: tuple[Pass, ...] = (
    IssueEarly(),
    SinkWaits(),
)
"""On forward and on backward, each by itself; where gathers are issued is the plan's decision."""

PHASE: tuple[Pass, ...] = (*SPMD, PrefetchGathers(AHEAD_BYTES))
"""On the programs of stages and micro-batches, whose steps the plan does not schedule."""


def local_program(
    joint: fx.GraphModule, graph: Graph, decisions: Decisions, rank: int, split: Collection[str], device: str
) -> tuple[fx.GraphModule, Localiser, tuple[Applied, ...]]:
    """Return the program of `rank` with collectives in it, who wrote it, and the passes that acted.

    Raises:
        RewriteError: an operator does not fit the layouts that the plan gives it.
    """
    localiser = Localiser(joint, graph, decisions, rank, split)
    gm = localiser.run()
    gm.graph.lint()
    names = {op.name: op.where for op in graph.ops}
    propagate(gm, names, by="localise")
    applied = run_passes(gm, kernels_for(device))
    if any(each.changes for each in applied):
        propagate(gm, names, by=f"kernels of {device}")
    return gm, localiser, (*applied, *run_passes(gm, (*places_for(device), *_LOCAL)))


def localised(
    joint: fx.GraphModule,
    graph: Graph,
    decisions: Decisions,
    rank: int,
    *,
    split: Collection[str] = (),
    device: str = "cpu",
) -> tuple[fx.GraphModule, tuple[Totals, ...]]:
    """Return `rank`'s program for one micro-batch, forward and backward together, and what is summed over all first.

    Its placeholders are those of `joint` on the shapes of a micro-batch, then those of the sums; its results are beside
    `graph.outputs`, each the micro-batch's term or part.

    Raises:
        RewriteError: an operator does not fit the layouts that the plan gives it, or needs all micro-batches at once.
    """
    gm, _, _ = local_program(joint, graph, with_time(squeeze(decisions)), rank, (MICROBATCH, *split), device)
    return gm, settle(gm, graph)
