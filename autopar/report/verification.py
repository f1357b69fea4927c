"""What `autopar verify` found, for the terminal and for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was compared."""

    name: str
    outcome: Literal["ok", "failed", "skipped"]
    found: str
    """What was measured, beside what is allowed or planned."""


def verification_text(plan: str, model: str, ranks: int, checks: Sequence[Check]) -> str:
    """Return a line a check, and one that counts."""
    width = max(len(each.name) for each in checks)
    lines = [f"{each.outcome:<8}{each.name:<{width}}  {each.found}" for each in checks]
    failed = sum(each.outcome == "failed" for each in checks)
    skipped = sum(each.outcome == "skipped" for each in checks)
    told = (f"{failed} failed" if failed else "none failed") + (f", {skipped} skipped" if skipped else "")
    last = f"{plan} of {model} on {ranks} ranks: {len(checks)} checks, {told}"
    return "\n".join([*lines, last]) + "\n"


def verification_json(plan: str, model: str, ranks: int, checks: Sequence[Check]) -> str:
    """Return `{plan, model, ranks, passed, checks: [{name, outcome, found}]}`."""
    passed = all(each.outcome != "failed" for each in checks)
    document = {"plan": plan, "model": model, "ranks": ranks, "passed": passed, "checks": [asdict(c) for c in checks]}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
