"""Write the shipped JSON Schemas anew: `python -m tests.ir.write_schema`."""

import json
from pathlib import Path

import autopar.ir
from autopar.ir.plan_json import plan_schema

FOLDER = Path(autopar.ir.__file__).parent / "schema"

if __name__ == "__main__":
    (FOLDER / "plan.schema.json").write_text(json.dumps(plan_schema(), indent=1) + "\n")
