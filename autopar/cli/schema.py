"""`autopar schema`: the JSON Schemas of the files."""

from __future__ import annotations

import sys
from importlib import resources
from typing import Annotated

import typer

from autopar.errors import UsageError
from autopar.suggest import did_you_mean

SCHEMAS = ("plan", "cluster")


def schema(
    name: Annotated[str, typer.Argument(metavar="|".join(SCHEMAS), help="Which file.", show_default=False)],
) -> int:
    """Print the JSON Schema of a file."""
    if name not in SCHEMAS:
        raise UsageError(f"there is no schema {name!r}{did_you_mean(name, SCHEMAS)}; schemas are {', '.join(SCHEMAS)}")
    sys.stdout.write(resources.files("autopar.ir").joinpath(f"schema/{name}.schema.json").read_text(encoding="utf-8"))
    return 0
