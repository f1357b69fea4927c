"""`autopar diff`: what differs between two plans."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.ir.plan import Plan


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A plan file.", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another plan file.", show_default=False)],
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 where the plans differ.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of {kind, name, before, after}.")] = False,
) -> int:
    """Tell what differs between two plans.

    In degrees, placements, collectives, time and memory.
    """
    from autopar.report.diff import diff_text, differences

    found = differences(Plan.load(before), Plan.load(after))
    if as_json:
        sys.stdout.write(json.dumps([dataclasses.asdict(each) for each in found], indent=1, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(diff_text(found))
    return 1 if found and exit_code else 0
