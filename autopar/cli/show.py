"""`autopar show`: a plan as text, data or picture."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.files import write
from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.suggest import did_you_mean

FORMATS = ("table", "json", "dot", "mermaid", "html", "trace")


def show(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)],
    format_: Annotated[
        str, typer.Option("--format", "-f", metavar="|".join(FORMATS), help="Form to show it in.")
    ] = "table",
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Instead of stdout.")] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Exposed seconds of its collectives beside what `autopar run --profile DIR` measured."
        ),
    ] = None,
) -> int:
    """Show a plan."""
    if format_ not in FORMATS:
        raise UsageError(f"--format {format_}: must be one of {', '.join(FORMATS)}{did_you_mean(format_, FORMATS)}")
    found = Plan.load(plan)
    if compare is not None and format_ != "table":
        raise UsageError(f"--compare prints a table; leave out --format {format_}")
    if compare is not None:
        from autopar.report.exposed import comparison

        write(comparison(found, compare), output)
        return 0
    if format_ == "table" and output is None:
        from autopar.report.table import print_table
        from autopar.simulate.planned import planned_timeline

        print_table(found, sys.stdout, planned_timeline(found))
    else:
        write(_writer(format_)(found), output)
    return 0


def _writer(name: str) -> Callable[[Plan], str]:
    """Return what writes a plan in the format; only that one is imported."""
    from autopar.ir.plan_json import to_json
    from autopar.report import pictures

    if name == "html":
        from autopar.report.html import html

        return html
    if name == "trace":
        from autopar.report.trace import plan_trace

        return plan_trace
    if name == "table":
        return _table
    return {"json": to_json, "dot": pictures.dot, "mermaid": pictures.mermaid}[name]


def _table(plan: Plan) -> str:
    from autopar.report.table import table_text
    from autopar.simulate.planned import planned_timeline

    return table_text(plan, timeline=planned_timeline(plan))
