"""A solved trial as the plan has it: decisions and predictions, overlap and stages included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.api.overlapping import overlapped, pipeline_spans
from autopar.api.solved import Solved
from autopar.api.solving import Solving
from autopar.api.unlike import peak_share, waiting
from autopar.costs.held import output_bytes
from autopar.costs.operators import issued_operators, least_seconds
from autopar.costs.outcome import Outcome
from autopar.figures import format_bytes, format_seconds
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
    """What its products take at the peak of all devices, or hosts to issue it: nothing is faster."""

    @property
    def fits(self) -> bool:
        """Return whether every rank holds no more than it may."""
        held = [(each.peak_memory_bytes, each.memory_budget_bytes) for each in self.estimates.per_stage]
        whole = (self.estimates.peak_memory_bytes, self.estimates.memory_budget_bytes)
        return all(peak <= budget for peak, budget in (whole, *held))


def described(solving: Solving, best: Solved, mesh: Mesh, degrees: Mapping[str, int]) -> Description:
    """Return the decisions and predictions of a solved trial on a mesh, of one stage, whose axes have names.

    Raises:
        RuntimeError: the trial has no outcome.
    """
    outcome, options, cluster = best.outcome, solving.options, solving.cluster
    if outcome is None:
        raise RuntimeError("a trial without an outcome cannot be described")
    dtype = PEAK_DTYPE[options.precision]
    estimates = outcome.estimates(solving.budget, dtype, solving.model_flops)
    found = overlapped(outcome, mesh, degrees, estimates, on=options.overlap, staged=best.pipeline is not None)
    decisions, estimates = found.decisions, found.estimates
    if best.pipeline is not None:
        homes = stage_of(outcome.graph, best.pipeline.stages)
        estimates = best.pipeline.estimates(estimates)
        estimates = replace(estimates, timeline=pipeline_spans(best.pipeline.timeline))
        decisions = best.pipeline.decisions(decisions, homes, outcome.graph)
        dropped = best.pipeline.dropped
    else:
        dropped, estimates = _with_outputs(outcome, estimates)
    more = (_outputs_dropped(outcome, dropped),) if dropped and outcome.keep_outputs is None else ()
    return Description(
        decisions=replace(decisions, recompute=ways_of(best.trial.recompute), outputs_dropped=dropped),
        estimates=replace(estimates, mfu=estimates.mfu * peak_share(cluster, dtype)),
        warnings=(*found.warnings, *more, *waiting(cluster, decisions.stages, dtype), *_behind(estimates, outcome)),
        floor_s=max(least_seconds(solving.program, cluster.devices), solving.least_issued_s),
    )


def _with_outputs(outcome: Outcome, estimates: Estimates) -> tuple[tuple[str, ...], Estimates]:
    """Return the outputs that are not kept over micro-batches, and the estimates with what the others take."""
    sizes = output_bytes(outcome)
    fit = estimates.peak_memory_bytes + sum(sizes.values()) <= estimates.memory_budget_bytes
    if not (fit if outcome.keep_outputs is None else outcome.keep_outputs):
        return tuple(sizes), estimates
    memory = replace(estimates.memory, activations=estimates.memory.activations + sum(sizes.values()))
    return (), replace(estimates, memory=memory, peak_memory_bytes=memory.total)


def _behind(estimates: Estimates, outcome: Outcome) -> Iterator[Warned]:
    """Yield that devices wait for their hosts, if that is much of a step."""
    host_s, device = estimates.breakdown.host_s, outcome.links.cluster.device
    if host_s > _MUCH * estimates.step_time_s:
        count = issued_operators(outcome.graph)
        yield Warned(
            code="host-bound",
            text=(
                f"devices wait {format_seconds(host_s)} of a step of {format_seconds(estimates.step_time_s)} for their "
                f"hosts, which issue {count} operators a micro-batch, each in about {format_seconds(device.host_s)}: "
                "more samples a micro-batch (a larger batch, or --fix microbatch=N) take no longer until devices are "
                "as slow; `kernel_launch` in the cluster file, or `autopar calibrate`, tells of another host"
            ),
        )


_MUCH = 0.05
"""Share of a step from which it is said that devices wait for their hosts."""


def _outputs_dropped(outcome: Outcome, dropped: Sequence[str]) -> Warned:
    sizes = output_bytes(outcome)
    text = (
        f"training steps return the loss without {', '.join(dropped)}: kept over {outcome.microbatches} micro-batches "
        f"that is {format_bytes(sum(sizes[name] for name in dropped))} a device, for which there is no room; calls "
        "under torch.no_grad() return all, and --keep-outputs demands it of training"
    )
    return Warned(code="outputs-dropped", text=text)
