"""`autopar validate`: predictions beside published measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def validate(
    rows: Annotated[Path, typer.Argument(metavar="ROWS.CSV", help="Published measurements.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> int:
    """Predict every row of published measurements and report the error.

    Tables of collectives and of achievable matmuls, told apart by their columns. Rows that cannot be priced are named
    and skipped.
    """
    from autopar.report.validation import validation_text
    from cost_models.validation import validate as validated

    document = validated(rows).document()
    sys.stdout.write(json.dumps(document, indent=1) + "\n" if as_json else validation_text(document))
    return 0
