"""Text with a unit to SI numbers, and back.

Every quantity crosses this boundary exactly once: files carry text with a
unit, everything inside carries SI numbers. Decimal prefixes are powers of ten
(GB = 1e9 bytes) and binary ones powers of two (GiB = 2**30 bytes). `Gb` is
refused because it is read both ways. Conversion is in decimal arithmetic, so
`3.35TB/s` is exactly 3.35e12.
"""

import re
from collections.abc import Mapping
from decimal import Decimal, Overflow

from cost_models.errors import UnitError, shown, suggestion

_DECIMAL = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}

_BYTES = {f"{prefix}B": Decimal(10) ** power for prefix, power in _DECIMAL.items()}
_BYTES |= {f"{prefix}B": Decimal(2) ** power for prefix, power in _BINARY.items()}
_BITS = {f"{prefix}bit": Decimal(10) ** power / 8 for prefix, power in _DECIMAL.items()}
_BANDWIDTH = {f"{unit}/s": scale for unit, scale in (_BYTES | _BITS).items()}
_FLOPS = {f"{prefix}FLOP/s": Decimal(10) ** power for prefix, power in _DECIMAL.items()}
_OPS = {f"{prefix}OP/s": scale for prefix, scale in ((p, Decimal(10) ** e) for p, e in _DECIMAL.items())}
_TIME = {
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
    "ns": Decimal("1e-9"),
}
_POWER = {"W": Decimal(1), "kW": Decimal(1000), "MW": Decimal(10) ** 6}
_FRACTION = {"%": Decimal("1e-2"), "fraction": Decimal(1)}

_LARGEST = Decimal(10) ** 24
"""No quantity of a cluster is larger in SI units; the largest catalogued rate is below 1e17."""

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*")
_AMBIGUOUS = re.compile(r"[kKMGTP]?b(/s|ps)?|[kKMGTP]?Bps")


def parse_bytes(text: object) -> int:
    """Return the bytes that `text`, such as `80GiB` or `80GB`, stands for."""
    return int(_parse(text, _BYTES, "a size in bytes", "80GiB").to_integral_value())


def parse_bandwidth(text: object) -> float:
    """Return the bytes/s that `text`, such as `450GB/s` or `3200Gbit/s`, stands for."""
    return float(_parse(text, _BANDWIDTH, "a bandwidth", "450GB/s"))


def parse_flops(text: object) -> float:
    """Return the FLOP/s that `text`, such as `312TFLOP/s` (int8: `624TOP/s`), stands for."""
    return float(_parse(text, _FLOPS | _OPS, "a compute rate", "312TFLOP/s"))


def parse_time(text: object) -> float:
    """Return the seconds that `text`, such as `1us`, stands for."""
    return float(_parse(text, _TIME, "a time", "1us"))


def parse_power(text: object) -> float:
    """Return the watts that `text`, such as `700W`, stands for."""
    return float(_parse(text, _POWER, "a power", "700W"))


def parse_fraction(text: object) -> float:
    """Return the fraction that `text` (`80%`) or a plain number (0.8) stands for."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    return float(_parse(text, _FRACTION, "a fraction", "80%"))


def format_bytes(value_bytes: float) -> str:
    """Return `value_bytes` for people, to two decimals: `93.00 GiB`."""
    for prefix in ("Pi", "Ti", "Gi", "Mi", "Ki"):
        scale = 2.0 ** _BINARY[prefix]
        if abs(value_bytes) >= scale:
            return f"{value_bytes / scale:.2f} {prefix}B"
    return f"{value_bytes:.0f} B"


def format_seconds(value_s: float) -> str:
    """Return `value_s` for people, to four digits: `12.35 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value_s) >= scale:
            return f"{value_s / scale:.4g} {unit}"
    return f"{value_s / 1e-9:.4g} ns"


def format_rate(value_per_s: float, unit: str = "B/s") -> str:
    """Return a rate for people, to four digits: `450 GB/s`, `312 TFLOP/s`."""
    for prefix in ("P", "T", "G", "M", "k"):
        scale = 10.0 ** _DECIMAL[prefix]
        if abs(value_per_s) >= scale:
            return f"{value_per_s / scale:.4g} {prefix}{unit}"
    return f"{value_per_s:.4g} {unit}"


def exact_bytes(value_bytes: int) -> str:
    """Return the shortest text that `parse_bytes` reads back as `value_bytes`."""
    return _exact(value_bytes, _BYTES)


def exact_bandwidth(value_bytes_per_s: float) -> str:
    """Return the shortest text that `parse_bandwidth` reads back exactly."""
    return _exact(value_bytes_per_s, {u: s for u, s in _BANDWIDTH.items() if "i" not in u})


def exact_flops(value_flops: float) -> str:
    """Return the shortest text that `parse_flops` reads back exactly."""
    return _exact(value_flops, _FLOPS)


def exact_seconds(value_s: float) -> str:
    """Return the shortest text that `parse_time` reads back exactly."""
    return _exact(value_s, _TIME)


def _exact(value: float, table: Mapping[str, Decimal]) -> str:
    candidates = []
    for unit, scale in table.items():
        number = format((Decimal(repr(value)) / scale).normalize(), "f")
        if type(value)(Decimal(number) * scale) == value:
            candidates.append(f"{number}{unit}")
    return min(candidates, key=len)


def _parse(text: object, table: Mapping[str, Decimal], what: str, example: str) -> Decimal:
    if isinstance(text, bool) or not isinstance(text, str):
        raise _no_unit(text, table, what, example)
    matched = _QUANTITY.fullmatch(text)
    if matched is None:
        message = f"{text!r} is not {what}; write a number and a unit, such as {example}"
        raise UnitError(message)
    number, unit = matched.groups()
    unit = unit.replace("µ", "u").replace("μ", "u")
    if not unit:
        raise _no_unit(text, table, what, example)
    if unit not in table:
        raise _unknown_unit(text, unit, table, what)
    try:
        value = Decimal(number) * table[unit]
    except Overflow:
        value = Decimal("Infinity")
    if abs(value) > _LARGEST:
        message = f"{text!r} is too large for {what} (more than 1e24 in SI units); write such as {example}"
        raise UnitError(message)
    return value


def _no_unit(text: object, table: Mapping[str, Decimal], what: str, example: str) -> UnitError:
    return UnitError(
        f"{shown(text)} has no unit; write {what} as a number and a unit, such as {example}"
        f" (known units: {', '.join(table)})"
    )


def _unknown_unit(text: str, unit: str, table: Mapping[str, Decimal], what: str) -> UnitError:
    known = f"known units: {', '.join(table)}"
    if _AMBIGUOUS.fullmatch(unit):
        bits, whole = (f"{unit[0]}bit/s", f"{unit[0]}B/s") if len(unit.split("/")[0]) > 1 else ("bit/s", "B/s")
        if "B/s" not in table:
            bits, whole = bits[:-2], whole[:-2]
        return UnitError(
            f"unit {unit!r} of {text!r} is ambiguous between bits and bytes; write {bits} or {whole} ({known})"
        )
    return UnitError(f"unknown unit {unit!r} of {text!r} for {what}{suggestion(unit, table)}; {known}")
