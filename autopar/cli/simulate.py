"""`autopar simulate`: what a plan would take on another cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.files import require_writable
from autopar.cli.planned import as_planned
from autopar.errors import UsageError
from autopar.figures import format_bytes, format_seconds
from autopar.ir.plan import Plan


def simulate(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)],
    cluster: Annotated[
        str,
        typer.Option("-c", "--cluster", metavar="CLUSTER", help="As for `autopar plan`.", show_default=False),
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="As for `autopar plan` [the plan's].", show_default=False)
    ] = None,
    batch: Annotated[str | None, typer.Option(metavar="N", help="Global batch [the plan's].")] = None,
    seq: Annotated[str | None, typer.Option(metavar="N", help="Sequence length [the plan's].")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override of the model's configuration [the plan's]."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where the plan for that cluster goes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan for that cluster on stdout.")] = False,
) -> int:
    """Price a PLAN's decisions, as they are, for another cluster.

    Exits with 1 where it does not fit in that cluster's memory.
    """
    found = Plan.load(plan)
    if output is not None:
        require_writable(output)
    named = model or found.workload.model
    if ":" not in named:
        raise UsageError(
            f"the plan was made for {named}, a class and no reference; name the model: autopar simulate PLAN MODEL -c "
            "CLUSTER"
        )
    options = as_planned(found, named, batch, seq, set_)
    from autopar import api
    from autopar.progress import Terminal

    with Terminal() as progress:
        there = api.reprice_reference(found, named, cluster, options.batch, options.seq, dict(options.set), progress)
    if output is not None:
        there.save(output)
    if as_json:
        from autopar.ir.plan_json import to_json

        sys.stdout.write(to_json(there))
    _tell(found, there)
    return int(there.estimates.peak_memory_bytes > there.estimates.memory_budget_bytes)


def _tell(found: Plan, there: Plan) -> None:
    """Print the plan for the other cluster, and below it both clusters' step and memory in a line, to stderr."""
    from autopar.report.table import print_table
    from autopar.simulate.planned import planned_timeline

    print_table(there, sys.stderr, planned_timeline(there))
    before, after = found.estimates, there.estimates
    print(
        f"on {found.cluster.get('name')}: step {format_seconds(before.step_time_s)}, peak memory "
        f"{format_bytes(before.peak_memory_bytes)}; on {there.cluster.get('name')}: "
        f"{format_seconds(after.step_time_s)}, {format_bytes(after.peak_memory_bytes)} "
        f"({_times(after.step_time_s, before.step_time_s)})",
        file=sys.stderr,
    )


def _times(after_s: float, before_s: float) -> str:
    """Return how much longer or shorter a step is, in words that stay readable where machines are far apart."""
    if after_s >= before_s:
        return f"{after_s / before_s:.3g} times as long"
    return f"{before_s / after_s:.3g} times as fast"
