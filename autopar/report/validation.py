"""Predictions beside published measurements, as tables for the terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from autopar.figures import format_seconds

_SKIPPED_SHOWN = 20
_WIDTH = 120


def validation_text(document: Mapping[str, Any]) -> str:
    """Return the report of `autopar validate` as text: errors in all and by source, worst rows, rows skipped."""
    from rich.console import Console
    from rich.table import Table

    has_memory = document.get("memory_mean_abs_rel_error") is not None
    has_device = document.get("too_large") is not None
    names = ["rows of", "rows", "median", "mean", "bias", "rank correlation"]
    names += [*(["memory, mean"] if has_memory else []), *(["too large"] if has_device else [])]
    errors = Table(*names, title=str(document["format"]), title_justify="left")
    for column in errors.columns[1:]:
        column.justify = "right"
    for name, each in (*document["parts"].items(), *document["sources"].items(), ("all", document)):
        cells = [str(each["rows"]), *(_percent(each[key], signed) for key, signed in _COLUMNS)]
        cells.append(_number(each.get("rank_correlation")))
        if has_memory:
            cells.append(_percent(each.get("memory_mean_abs_rel_error")))
        if has_device:
            cells.append(str(each.get("too_large", "-")))
        errors.add_row(name, *cells)
    worst = Table("line", "worst rows", "measured", "predicted", "error")
    for each in document["worst"]:
        seconds = (format_seconds(each[key]) for key in ("measured_s", "predicted_s"))
        worst.add_row(str(each["line"]), each["row"], *seconds, _percent(each["rel_error"], signed=True))
    out = io.StringIO()
    console = Console(file=out, width=_WIDTH, no_color=True, markup=False, highlight=False)
    console.print(errors)
    if document["worst"]:
        console.print(worst)
    return out.getvalue() + _footer(document)


_COLUMNS = (("median_abs_rel_error", False), ("mean_abs_rel_error", False), ("bias", True))


def _footer(document: Mapping[str, Any]) -> str:
    lines = []
    if document.get("too_large") is not None:
        lines.append("too large: rows predicted to take more memory than the device has that they ran on")
    for each in document.get("assumptions", ()):
        first, *more = each["lines"]
        others = f" and {len(more)} more" if more else ""
        lines.append(f"assumed: {each['what']}: line {first}{others}")
    skipped = document["skipped_rows"]
    lines.append(f"skipped: {len(skipped)}")
    lines += [f"  line {each['line']}: {each['reason']}" for each in skipped[:_SKIPPED_SHOWN]]
    if len(skipped) > _SKIPPED_SHOWN:
        lines.append(f"  and {len(skipped) - _SKIPPED_SHOWN} more (--json lists all)")
    return "\n".join([*lines, ""])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"
