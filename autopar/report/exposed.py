"""Exposed seconds of collectives: what a plan predicts beside what `autopar run --profile` measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.figures import format_degrees, format_seconds
from autopar.ir.plan import Plan
from autopar.ir.plan_json import decisions_digest
from autopar.ir.tasks import awaited, collective_name

_US = 1e6

PATTERN = "rank*.json"
"""Names of the files that `autopar run --profile` writes, one a rank."""


@dataclass(frozen=True, slots=True)
class Exposed:
    """Exposed seconds of one of the plan's collectives, all its instances in a step together."""

    name: str
    count: int
    predicted_s: float | None
    """`None`: the plan has no such collective."""

    measured_s: float
    """Mean over ranks and steps."""

    @property
    def error_s(self) -> float:
        """Return how far the prediction is off, in seconds."""
        return abs(self.measured_s - (self.predicted_s or 0.0))


def plan_note(plan: Plan) -> dict[str, str]:
    """Return what a profile notes of the plan it was measured on: `digest` of its decisions, and its `name`."""
    work = plan.workload
    name = f"{format_degrees(plan.decisions.degrees)} of {work.model}, batch {work.global_batch}"
    return {"digest": decisions_digest(plan), "name": name}


def compare(plan: Plan, folder: Path) -> list[Exposed]:
    """Return the plan's collectives, largest error first, and those measured that the plan does not know.

    Raises:
        UsageError: there is nothing measured in the folder, it is of another plan, or the plan has no timeline.
    """
    if not plan.estimates.timeline:
        raise UsageError("the plan predicts no timeline to compare with; plan again, without --fix microbatch")
    measured = _measured(folder, plan_note(plan))
    kinds = {each.name: each.kind for each in plan.estimates.timeline if each.kind >= 0}
    by_kind: dict[int, float] = {}
    unknown: dict[str, float] = {}
    for name, seconds in measured.items():
        if name in kinds:
            by_kind[kinds[name]] = by_kind.get(kinds[name], 0.0) + seconds
        else:
            unknown[name] = seconds
    found = [
        Exposed(
            collective_name(each.op, each.tensor, each.axis, each.phase),
            each.count,
            each.exposed_s,
            by_kind.get(kind, 0.0),
        )
        for kind, each in enumerate(plan.decisions.collectives)
    ]
    found += [Exposed(name, 1, None, seconds) for name, seconds in unknown.items()]
    return sorted(found, key=lambda each: -each.error_s)


def comparison(plan: Plan, folder: Path) -> str:
    """Return the comparison as text, a collective a line and their sum last."""
    found = compare(plan, folder)
    rows = [("collective", "count", "predicted", "measured", "error"), *map(_row, found)]
    rows.append(
        (
            "all",
            str(sum(each.count for each in found)),
            format_seconds(sum(each.predicted_s or 0.0 for each in found)),
            format_seconds(sum(each.measured_s for each in found)),
            format_seconds(sum(each.error_s for each in found)),
        )
    )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(f"{_line(row, widths)}\n" for row in rows)


def _row(each: Exposed) -> tuple[str, ...]:
    predicted = "not in the plan" if each.predicted_s is None else format_seconds(each.predicted_s)
    return each.name, str(each.count), predicted, format_seconds(each.measured_s), format_seconds(each.error_s)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = row
    return "  ".join(
        [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))]
    )


def _measured(folder: Path, note: Mapping[str, str]) -> Mapping[str, float]:
    """Return the exposed seconds of each collective in a step, the mean over ranks and steps."""
    files = sorted(folder.glob(PATTERN)) if folder.is_dir() else []
    if not files:
        raise UsageError(
            f"{folder} holds no profile (no {PATTERN}); write one with "
            f"`autopar run PLAN --profile {folder} -- train.py`"
        )
    found: dict[str, float] = {}
    for file in files:
        document = _read(file)
        _require_same_plan(folder, document["autopar"].get("plan", {}), note)
        steps = document["autopar"]["steps"]
        for name, seconds in _exposed(document["traceEvents"]):
            found[name] = found.get(name, 0.0) + seconds / steps / len(files)
    return found


def _require_same_plan(folder: Path, measured: Mapping[str, str], note: Mapping[str, str]) -> None:
    if measured.get("digest") != note["digest"]:
        of = measured.get("name", "does not say which")
        same = ", by name: their layouts or schedules differ" if of == note["name"] else ""
        raise UsageError(
            f"{folder} was measured on another plan ({of}) than this one ({note['name']}{same}); compare it with the "
            f"plan that was run, or measure this one with `autopar run PLAN --profile {folder} -- train.py`"
        )


def _read(file: Path) -> Any:
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read the profile {file}: {error}") from None
    if not isinstance(document, dict) or "traceEvents" not in document or "steps" not in document.get("autopar", {}):
        raise UsageError(
            f"{file} is no profile that `autopar run --profile` wrote: it does not say how many steps it has"
        )
    return document


def _exposed(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    for event in events:
        name = awaited(str(event.get("name", ""))) if event.get("ph") == "X" else None
        if name is not None:
            yield name, event["dur"] / _US
