"""`autopar check`: hold a plan against limits, a baseline and what is installed."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.files import write
from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.suggest import did_you_mean


def check(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)],
    baseline: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Be no slower, larger or chattier than this plan (by 2%).")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Limits and tolerances: [limits], [tolerance], [warnings].")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("-c", "--cluster", metavar="CLUSTER", help="Be made for this cluster.")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", "-f", metavar="text|json|github|junit|sarif", help="Form of the findings.")
    ] = "text",
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Instead of stdout.")] = None,
) -> int:
    """Exit with 1 where a plan breaks a rule.

    Over budget, stale, over a limit of the policy, or worse than the baseline.
    """
    from autopar.report.check import Here, load_policy
    from autopar.report.check import check as verdict_of
    from autopar.report.verdict import FORMATS

    if format_ not in FORMATS:
        raise UsageError(f"--format {format_}: must be one of {', '.join(FORMATS)}{did_you_mean(format_, FORMATS)}")
    verdict = verdict_of(
        Plan.load(plan),
        str(plan),
        baseline=Plan.load(baseline) if baseline else None,
        policy=load_policy(policy) if policy else None,
        here=Here(cluster=_resolved(cluster) if cluster else None, torch=_installed_torch()),
    )
    write(FORMATS[format_](verdict), output)
    return 1 if verdict.findings else 0


def _resolved(cluster: str) -> dict[str, Any]:
    """Return the cluster as a plan file holds it."""
    from cost_models.cluster import ClusterSpec

    document: dict[str, Any] = json.loads(json.dumps(ClusterSpec.parse(cluster).to_dict()))
    return document


def _installed_torch() -> str | None:
    """Return the version of the installed torch without importing it; None where there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
