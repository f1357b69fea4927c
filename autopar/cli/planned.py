"""The model of a plan once more: the sizes and settings that it was planned with, unless a command says others."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.plan import Plan
from autopar.options import PlanOptions


def as_planned(
    plan: Plan, model: str, batch: str | None, seq: str | None, settings: Sequence[str] | None
) -> PlanOptions:
    """Return what a model reference is to be resolved with: flags, and the plan's own where there is no flag.

    Settings (`--set`) are the plan's for the reference that it names only: another's model need not have them.

    Raises:
        UsageError: a flag has a wrong value.
    """
    work = plan.workload
    tokens, samples = work.tokens_per_step, work.global_batch
    length = str(tokens // samples) if tokens and samples else None
    said = PlanOptions.parse(batch=batch or str(samples), seq=seq or length, set=settings)
    kept = work.settings if model == work.model else {}
    return PlanOptions.parse(batch=said.batch, seq=said.seq, set={**kept, **said.set})
