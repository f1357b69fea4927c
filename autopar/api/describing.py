"""A solved trial as the plan has it: decisions and predictions, overlap and stages included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.api.overlapping import overlapped, pipeline_spans
from autopar.api.solving import Solved, Solving
from autopar.api.unlike import peak_share, waiting
from autopar.costs.operators import least_seconds
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Decisions, Estimates, Warned
from autopar.ir.stages import stage_of
from autopar.search.trials import ways_of

PEAK_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The type whose peak MFU refers to, by precision."""


@dataclass(frozen=True)
class Description:
    """What a plan says of a solved trial."""

    decisions: Decisions
    estimates: Estimates
    warnings: tuple[Warned, ...]

    floor_s: float
    """What its products take at the peak of all devices: nothing is faster."""


def described(solving: Solving, best: Solved, mesh: Mesh, degrees: Mapping[str, int]) -> Description:
    """Return the decisions and predictions of a solved trial on a mesh, of one stage, whose axes have names.

    Raises:
        RuntimeError: the trial has no outcome.
    """
    outcome, options, cluster = best.outcome, solving.options, solving.cluster
    if outcome is None:
        raise RuntimeError("a trial without an outcome cannot be described")
    dtype = PEAK_DTYPE[options.precision]
    estimates = outcome.estimates(solving.budget, dtype)
    found = overlapped(outcome, mesh, degrees, estimates, on=options.overlap, staged=best.pipeline is not None)
    decisions, estimates = found.decisions, found.estimates
    if best.pipeline is not None:
        homes = stage_of(outcome.graph, best.pipeline.stages)
        estimates = best.pipeline.estimates(estimates)
        estimates = replace(estimates, timeline=pipeline_spans(best.pipeline.timeline))
        decisions = best.pipeline.decisions(decisions, homes, outcome.graph)
    return Description(
        decisions=replace(decisions, recompute=ways_of(best.trial.recompute)),
        estimates=replace(estimates, mfu=estimates.mfu * peak_share(cluster, dtype)),
        warnings=(*found.warnings, *waiting(cluster, decisions.stages, dtype)),
        floor_s=least_seconds(solving.program, cluster.devices),
    )
