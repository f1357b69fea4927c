"""`autopar validate`: predictions beside published measurements."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cost_models.published import Priced
    from cost_models.validation import Row, Skipped


def validate(
    rows: Annotated[Path, typer.Argument(metavar="ROWS.CSV", help="Published measurements.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> int:
    """Predict every row of published measurements and report the error.

    Tables of training steps, of collectives and of achievable matmuls, told apart by their columns. Rows that cannot
    be priced are named and skipped; what was assumed of others (a framework that is not known is plain PyTorch) is
    said below the tables.

    Errors are predicted over measured, less 1; bias is their mean. The rank correlation is of rows that differ in
    size only. Too large are rows whose predicted peak memory is more than their device has, though they ran on it:
    they count in all other columns.
    """
    from autopar.report.validation import validation_text
    from cost_models.validation import validate as validated

    document = validated(rows, _price_steps).document()
    sys.stdout.write(json.dumps(document, indent=1) + "\n" if as_json else validation_text(document))
    return 0


def _price_steps(rows: Sequence[Row]) -> Iterable[Priced | Skipped]:
    """Return rows of training steps, priced; torch is imported for these alone."""
    from autopar.api.validating import price_steps

    return price_steps(rows)
