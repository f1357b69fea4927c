"""Cells of a table of training steps: text, answers, numbers and degrees, or an error that names the column."""

import re
from collections.abc import Mapping

from cost_models.errors import CostModelError

Cells = Mapping[str, str]

_YES = ("yes", "true", "1", "y", "on", "x", "enabled")
_NO = ("no", "false", "0", "n", "off", "disabled")

_NOTHING = frozenset({"", "-", "--", "\u2013", "\u2014", "na", "n/a", "none", "null", "nan", "unknown", "?"})
"""Texts of cells that say nothing; dashes of any length are such."""

_NEUTRAL = _NOTHING | frozenset(_NO) | {"1", "1.0", "0.0"}
"""Texts of cells that say of a degree, or of something that is on or off, that there is none."""

_GROUPED = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
"""A number whose thousands are set apart by commas."""

_EITHER = re.compile(r"[1-9]\d{0,2},\d{3}")
"""A number whose comma may set apart thousands or decimals."""

_THOUSANDS = re.compile(r"\d+(\.\d+)?k", re.IGNORECASE)


def said(row: Cells, column: str) -> str:
    """Return a cell's text; empty where it says nothing, in one of the ways that tables have for that."""
    text = (row.get(column) or "").strip()
    return "" if text.lower() in _NOTHING else text


def text_of(row: Cells, column: str) -> str:
    """Return a cell's text. Raises `CostModelError` where it is missing."""
    found = (row.get(column) or "").strip()
    if not found:
        raise CostModelError(f"{column} is missing")
    return found


def choice_of(row: Cells, column: str, known: tuple[str, ...]) -> str:
    """Return a cell's text in small letters, one of those known. Raises `CostModelError` of others."""
    found = text_of(row, column).lower()
    if found not in known:
        raise CostModelError(f"{column} is {found!r}, not one of {', '.join(known)}")
    return found


def answer_of(row: Cells, column: str) -> bool:
    """Return whether a cell says yes; one that says nothing says no. Raises `CostModelError` of other texts."""
    return bool(said(row, column)) and choice_of(row, column, (*_YES, *_NO)) in _YES


def number_of(row: Cells, column: str) -> float:
    """Return a cell's number of at least 0; commas set apart thousands, or decimals.

    Raises `CostModelError` of others, and of those that may be either (`1,234`).
    """
    text = text_of(row, column)
    if _EITHER.fullmatch(text):
        whole, rest = text.split(",")
        raise CostModelError(f"{column} is {text!r}, which may be {whole}{rest} or {whole}.{rest}: write one of these")
    plain = text.replace(",", "") if _GROUPED.fullmatch(text) else re.sub(r"^(\d+),(\d+)$", r"\1.\2", text)
    try:
        value = float(plain)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise CostModelError(f"{column} is {row[column]!r}, not a number of at least 0")
    return value


def rate_of(row: Cells, column: str) -> float:
    """Return a cell's number, 0 where it says none."""
    return number_of(row, column) if said(row, column) else 0.0


def positive_of(row: Cells, column: str) -> float:
    """Return a cell's number above 0. Raises `CostModelError` of others."""
    value = number_of(row, column)
    if not value:
        raise CostModelError(f"{column} is {row[column]!r}, not a number above 0")
    return value


def count_of(row: Cells, column: str) -> int:
    """Return a cell's whole number above 0; commas set apart thousands. Raises `CostModelError` of others."""
    text = text_of(row, column)
    if _THOUSANDS.fullmatch(text):
        about = float(text[:-1])
        raise CostModelError(
            f"{column} is {text!r}, which may be {about * 1000:.0f} or {about * 1024:.0f}: write one of these"
        )
    value = positive_of({column: text.replace(",", "")} if _GROUPED.fullmatch(text) else row, column)
    if value != int(value):
        raise CostModelError(f"{column} is {row[column]!r}, not a whole number")
    return int(value)


def peak_bytes_of(row: Cells) -> tuple[float | None, bool]:
    """Return the measured peak memory in bytes, None where a row has none, and whether it is that of tensors alone.

    What a process holds (`measured_peak_gib`) goes before what was allocated in it (`measured_allocated_gib`).
    """
    for column, alone in (("measured_peak_gib", False), ("measured_allocated_gib", True)):
        if said(row, column):
            return positive_of(row, column) * 2**30, alone
    return None, False


def has_degree(row: Cells, column: str) -> bool:
    """Return whether an optional cell says something: none, 0 and 1 say nothing."""
    return (row.get(column) or "").strip().lower() not in _NEUTRAL


def degree_of(row: Cells, column: str) -> int:
    """Return the degree of an optional cell; 1 where it says nothing."""
    return count_of(row, column) if has_degree(row, column) else 1


_PER_STEP = (
    ("tokens_per_s_per_gpu", ("global_batch", "seq_len"), True),
    ("tokens_per_s", ("global_batch", "seq_len"), False),
    ("samples_per_s", ("global_batch",), False),
)
"""Columns of rates that say a step's time: what of a step they count, and whether they are of one GPU."""

_UTILISATIONS = ("mfu", "hfu", "tflops", "tflop_per_s_per_gpu")


def step_s_of(row: Cells) -> float:
    """Return the seconds of a measured step: of `measured_step_s`, or by a rate (`_PER_STEP`).

    Raises `CostModelError` where there is neither; utilisations are none, for everybody counts operations otherwise.
    """
    text = said(row, "measured_step_s")
    if text.endswith("%"):
        raise CostModelError(f"measured_step_s is {text!r}: a share is no time; write the seconds of a step")
    unit = re.fullmatch(r"([\d.,]+) ?(ms|s|sec|seconds)", text)
    if unit:
        return positive_of({"measured_step_s": unit[1]}, "measured_step_s") * (1e-3 if unit[2] == "ms" else 1.0)
    if text:
        return positive_of(row, "measured_step_s")
    for column, counted, of_one in _PER_STEP:
        if said(row, column):
            amount = 1.0
            for each in counted:
                amount *= count_of(row, each)
            return amount / positive_of(row, column) / (count_of(row, "gpus") if of_one else 1)
    utilisation = next((column for column in _UTILISATIONS if said(row, column)), "")
    if utilisation:
        raise CostModelError(
            f"measured_step_s is missing, and {utilisation} does not say it: what counts as an operation differs; write"
            f" the seconds of a step, or one of {', '.join(column for column, *_ in _PER_STEP)}"
        )
    raise CostModelError("measured_step_s is missing")
