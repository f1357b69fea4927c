"""Seconds, bytes and degrees as people read them: the same form in tables, messages and reports."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.mesh import AXIS_NAMES

_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))

_ROUNDING_S = 1e-15
"""Differences of durations below this are rounding: nothing that is planned is as short."""


def format_seconds(seconds: float) -> str:
    """Return a duration with the unit that suits its size: `1.23 s`, `45.6 ms`, `7.8 us`; below a femtosecond `0 s`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            digits = f"{seconds / scale:.3g}"
            return f"{seconds / scale:.0f} {unit}" if "e" in digits else f"{digits} {unit}"
    return f"{seconds / 1e-6:.3g} us" if abs(seconds) >= _ROUNDING_S else "0 s"


def format_bytes(count: float) -> str:
    """Return a number of bytes in binary units: `80.00 GiB`, `1.50 MiB`, `12 B`."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def format_figure(value: float, unit: str) -> str:
    """Return a figure of the cost model: `4.5 us`, `12.3 GB/s`, `1.5 TFLOP/s`; in a unit without prefixes, as it is."""
    if unit == "s":
        return format_seconds(value)
    prefix, scale = next((each for each in _PREFIXES if abs(value) >= each[1]), ("", 1.0))
    return f"{value / scale:.4g} {prefix}{unit}" if unit.endswith("/s") else f"{value:.4g} {unit}"


def format_change(before: float, after: float) -> str:
    """Return the relative change with its sign: `+20.0%`; `new` where there was nothing before."""
    if before == after:
        return "+0.0%"
    return f"{after / before - 1:+.1%}" if before else "new"


def format_degrees(degrees: Mapping[str, int]) -> str:
    """Return the degrees above 1, outermost first: `dp_shard=2 x tp=4`; `1 device` where there are none."""
    order = {name: i for i, name in enumerate(AXIS_NAMES)}
    found = sorted((name for name, degree in degrees.items() if degree > 1), key=lambda name: order.get(name, 99))
    return " x ".join(f"{name}={degrees[name]}" for name in found) or "1 device"
