"""What every measurement carries with it, and where it is kept.

Lines from different days and machines may share a file, because each says where it comes from.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def stamp() -> dict[str, Any]:
    """Return the machine, the versions, the commit and the date of a measurement taken now."""
    return {
        "machine": platform.platform(),
        "cpu": _cpu(),
        "cores": _cores(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def spread(seconds: Sequence[float]) -> dict[str, float | int]:
    """Return median, least and largest of some seconds, and how many they are."""
    return {
        "measured_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "repeats": len(seconds),
    }


def write(row: Mapping[str, Any], path: Path | None) -> None:
    """Print a measurement as one line of JSON with its stamp, and append it to `path`, if any."""
    line = json.dumps({**row, **stamp()})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def markdown(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return the rows as a Markdown table; a value that a row lacks stays empty."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def renew(tables: Mapping[str, str]) -> None:
    """Write Markdown tables between their marks in docs/, from `<!-- table NAME -->` to `<!-- end -->`.

    Raises:
        LookupError: a table has no place, or several.
    """
    pages = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))}
    for name, table in tables.items():
        mark = f"<!-- table {name} -->\n"
        places = [path for path, text in pages.items() for _ in range(text.count(mark))]
        if len(places) != 1:
            raise LookupError(f"docs/ has {len(places)} places for table {name!r}, not one")
        before, _, rest = pages[places[0]].partition(mark)
        pages[places[0]] = f"{before}{mark}{table}<!-- end -->{rest.partition('<!-- end -->')[2]}"
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}"
        case dict():
            return " ".join(f"{key}={each}" for key, each in value.items())
        case list() | tuple():
            return ", ".join(map(str, value))
    return str(value).replace("|", "/").replace("\n", " ")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _commit() -> str:
    """Return the commit of this repository, with a `+` where files that git knows were changed since."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "autopar", "cost_models")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
