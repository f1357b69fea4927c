"""The precision of the computation as a choice of the search: a plan for each, the fastest of them is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.figures import format_seconds
from autopar.ir.plan import Alternative, Plan, Warned
from autopar.options import PlanOptions, Precision

TRIED: tuple[Precision, ...] = ("fp32", "bf16")
"""What `auto` chooses from. fp16 needs a gradient scaler in the user's loop, and so is never taken unasked."""


def fastest(plan_with: Callable[[PlanOptions], Plan], options: PlanOptions) -> Plan:
    """Return the plan of the precision that is asked for; of `auto`, the fastest, each searched for its share of time.

    A plan in fewer bits says so in a warning, and what others take among its alternatives. Its bound is that of all.

    Raises:
        InfeasibleError: none of them has a plan.
    """
    if options.precision != "auto":
        return plan_with(options)
    share = options.time_limit / len(TRIED)
    found: dict[Precision, Plan] = {}
    refused: dict[Precision, InfeasibleError] = {}
    for precision in TRIED:
        try:
            found[precision] = plan_with(replace(options, precision=precision, time_limit=share))
        except InfeasibleError as error:
            refused[precision] = error
    if not found:
        raise refused[TRIED[-1]]
    best = min(found, key=lambda each: found[each].estimates.step_time_s)
    plan = found[best]
    step_s = plan.estimates.step_time_s
    others = _others(best, step_s, found, refused)
    bound = min(other.solver.bound for other in found.values())
    solver = replace(
        plan.solver,
        bound=bound,
        gap=1.0 - bound / plan.solver.objective if plan.solver.objective > 0 else 0.0,
        candidates=sum(other.solver.candidates for other in found.values()),
        seconds=None if plan.solver.seconds is None else sum(each.solver.seconds or 0.0 for each in found.values()),
    )
    return replace(
        plan,
        solver=solver,
        alternatives=(*others, *plan.alternatives)[: max(options.top_k, len(others))],
        warnings=(*plan.warnings, *_warnings(best, step_s, found)),
    )


def _others(
    best: Precision, step_s: float, found: dict[Precision, Plan], refused: dict[Precision, InfeasibleError]
) -> list[Alternative]:
    """Return what the other precisions come to, and why those come to nothing that have no plan."""
    slower = [
        Alternative(
            degrees=other.decisions.degrees,
            step_time_s=other.estimates.step_time_s,
            peak_memory_bytes=other.estimates.peak_memory_bytes,
            why_not=f"computes in {precision}: {other.estimates.step_time_s / step_s:.2f} times as long",
        )
        for precision, other in found.items()
        if precision != best
    ]
    return slower + [
        Alternative(degrees={}, step_time_s=None, peak_memory_bytes=None, why_not=f"computes in {precision}: {error}")
        for precision, error in refused.items()
    ]


def _warnings(best: Precision, step_s: float, found: dict[Precision, Plan]) -> tuple[Warned, ...]:
    if best == "fp32":
        return ()
    whole = found.get("fp32")
    less = f"{format_seconds(step_s)} a step instead of {format_seconds(whole.estimates.step_time_s)}" if whole else ""
    return (
        Warned(
            code="precision-chosen",
            text=f"computes in {best} under autocast, parameters in float32: {less or 'float32 does not fit'}; losses "
            "are not those of float32 to its last digits. --precision fp32 keeps these",
        ),
    )
