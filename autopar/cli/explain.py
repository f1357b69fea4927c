"""`autopar explain`: why a plan is as it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.ir.plan import Plan


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)],
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="A parameter, operator or module.", show_default=False)
    ] = None,
) -> int:
    """Tell why a plan is as it is.

    A choice, what it was weighed against, and the source of each figure.
    """
    from autopar.report.explain import explain as text_of

    sys.stdout.write(text_of(Plan.load(plan), node))
    return 0
