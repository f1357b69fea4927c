"""What NVIDIA's nccl-tests print, as timed collectives.

Columns are found by the header, because versions differ in them. Sizes are as nccl-tests defines them in
doc/PERFORMANCE.md: of gathers and scatters the whole tensor, as here.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.errors import CostModelError

_OPS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "point_to_point",
}
_NAMED = re.compile(r"\b(" + "|".join(_OPS) + r")(?:_perf)?(?:_mpi)?\b", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:e[+-]?\d+)?")
_RANK = re.compile(r"#\s*Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*\S)")


@dataclass(frozen=True)
class NcclRun:
    """One run of one test."""

    op: str
    ranks: int
    hosts: int
    device: str
    """As the driver calls it."""

    samples: tuple[dict[str, Any], ...]
    """`op`, `ranks`, `bytes` and `seconds`: out of place and in place."""


def read_nccl_tests(path: Path) -> NcclRun:
    """Return the run whose output a file holds.

    Raises `CostModelError` where the file cannot be read, names no collective, or has no row of figures.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CostModelError(f"{path}: cannot be read: {reason}") from None
    return parse_nccl_tests(text, str(path))


def parse_nccl_tests(text: str, origin: str) -> NcclRun:
    """Return the run whose output is `text`; `origin` names it in errors and may name the collective."""
    ranks = {int(found[1]): (found[2], found[3]) for found in map(_RANK.match, text.splitlines()) if found}
    if len(ranks) < 2:
        raise CostModelError(
            f"{origin}: lists {len(ranks)} ranks under '# Using devices', and a collective needs 2; keep the whole"
            " output of nccl-tests, header included"
        )
    op = _operation(text, origin)
    hosts = len({host for host, _ in ranks.values()})
    if len(ranks) % hosts:
        raise CostModelError(f"{origin}: {len(ranks)} ranks on {hosts} hosts: needs as many on every host")
    times = _time_columns(text, origin)
    samples = []
    for line in text.splitlines():
        words = line.split()
        if len(words) <= times[0] or not words[0].isdigit() or words[0] == "0":
            continue
        values = [float(words[i]) for i in times if i < len(words) and _NUMBER.fullmatch(words[i])]
        seconds = [value * 1e-6 for value in values if value > 0]
        if seconds:
            samples.append({"op": op, "ranks": len(ranks), "bytes": int(words[0]), "seconds": seconds})
    if not samples:
        raise CostModelError(f"{origin}: has no row of figures above 0 bytes, such as '8388608 2097152 float sum ...'")
    return NcclRun(op, len(ranks), hosts, next(iter(ranks.values()))[1], tuple(samples))


def _operation(text: str, origin: str) -> str:
    named = _NAMED.search(text) or _NAMED.search(Path(origin).name.replace("-", "_"))
    if named is None:
        raise CostModelError(
            f"{origin}: does not say which collective it timed; name the file after it, such as all_reduce_perf.txt"
            f" (known: {', '.join(dict.fromkeys(_OPS.values()))})"
        )
    return _OPS[named[1].lower()]


def _time_columns(text: str, origin: str) -> list[int]:
    """Return the places of the columns `time`: out of place, and in place where there is one."""
    for line in text.splitlines():
        words = line.replace("#wrong", "wrong").lstrip("# ").split()
        if words[:2] == ["size", "count"] and "time" in words:
            return [place for place, word in enumerate(words) if word == "time"]
    raise CostModelError(f"{origin}: has no header '# size count type ... time algbw busbw'; keep the whole output")
