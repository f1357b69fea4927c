"""Published and measured figures, each with its unit, source and kind.

The YAML files beside this one hold the figures; this loader is the only place
where they become SI numbers. `kind` says how far to trust a figure: datasheet,
measured (by whom, in `source`), fitted (to measurements by this model) or
assumed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cost_models import units
from cost_models.errors import ClusterError, CostModelError, suggestion

KINDS = ("datasheet", "measured", "fitted", "assumed")

FORMAT = 3
"""Of the figures that a device and a link have; a calibration file made for an older one lacks some."""

FORMATS: Mapping[int, str] = {
    2: "fresh_size and fresh_bandwidth of a device's memory, host_bandwidth and efficiency_of of links",
    3: "attention_half and attention_block of a device; memory and products are measured where freed memory is kept",
}
"""What each format added."""

Value = float | int | bool | str

_HERE = Path(__file__).parent
_FILES = {
    "devices": ("nvidia.yaml", "amd.yaml", "google.yaml", "cpu.yaml"),
    "links": ("fabrics.yaml",),
    "nics": ("fabrics.yaml",),
    "nodes": ("nodes.yaml",),
    "libraries": ("libraries.yaml",),
    "stacks": ("stacks.yaml",),
}
_BYTE_UNITS = frozenset({"B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"})


@dataclass(frozen=True)
class Figure:
    """One value of the catalogue, in SI units, and where it comes from."""

    value: Value
    unit: str
    """The unit as written in the file; `value` is already SI."""

    kind: str
    source: str


Entry = Mapping[str, "Figure | Mapping[str, Figure]"]


def names(section: str) -> tuple[str, ...]:
    """Return the names of `section` (devices, nodes, links, nics, libraries or stacks) in catalogue order."""
    return tuple(_section(section))


@cache
def entry(section: str, name: str) -> Entry:
    """Return the figures of one catalogue entry, converted to SI.

    Raises `ClusterError` with the closest name where there is no such entry.
    """
    known = _section(section)
    if name not in known:
        raise unknown_entry(section, name)
    return {key: _figures(each, f"{section}.{name}.{key}") for key, each in known[name].items()}


def unknown_entry(section: str, name: str) -> ClusterError:
    """Return the error for a name that the catalogue does not hold."""
    known = names(section)
    singular = "library" if section == "libraries" else section.removesuffix("s")
    return ClusterError(
        f"unknown {singular} preset {name!r}{suggestion(name, known)}; known {singular} presets: {', '.join(known)}"
    )


def figure(of: Entry, key: str) -> Figure:
    """Return the single figure `key` of an entry."""
    found = of.get(key)
    if not isinstance(found, Figure):
        message = f"the catalogue has no single figure {key!r}; it has {', '.join(of)}"
        raise CostModelError(message)
    return found


def number(of: Entry, key: str, default: float | None = None) -> float:
    """Return figure `key` as a number in SI units."""
    if default is not None and key not in of:
        return default
    return float(figure(of, key).value)


def text(of: Entry, key: str) -> str:
    """Return figure `key` as text."""
    return str(figure(of, key).value)


def mapping(of: Entry, key: str) -> Mapping[str, Figure]:
    """Return the figures under `key`, such as `compute`, by their names; of a key that the entry lacks none."""
    found = of.get(key, {})
    return {} if isinstance(found, Figure) else found


@cache
def _document(file: str) -> Mapping[str, Any]:
    text = (_HERE / file).read_text(encoding="utf-8")
    has_libyaml = hasattr(yaml, "CSafeLoader")  # ten times faster than the one in Python
    loaded: Mapping[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader) if has_libyaml else yaml.safe_load(text)
    return loaded


@cache
def _section(section: str) -> Mapping[str, Mapping[str, Any]]:
    merged: dict[str, Mapping[str, Any]] = {}
    for file in _FILES[section]:
        merged.update(_document(file)[section])
    return merged


def _figures(raw: Mapping[str, Any], where: str) -> Figure | Mapping[str, Figure]:
    if "value" not in raw:
        return {key: _figure(each, f"{where}.{key}") for key, each in raw.items()}
    return _figure(raw, where)


def _figure(raw: Mapping[str, Any], where: str) -> Figure:
    if set(raw) != {"value", "unit", "kind", "source"} or raw["kind"] not in KINDS:
        message = f"catalogue, {where}: a figure needs value, unit, source and kind ({', '.join(KINDS)}), not {raw!r}"
        raise CostModelError(message)
    value, unit = raw["value"], raw["unit"]
    return Figure(_to_si(value, unit), unit, raw["kind"], raw["source"])


def _to_si(value: Value, unit: str) -> Value:
    if unit in ("none", "count", "fraction"):
        return value
    return _parser(unit)(f"{value!r}{unit}")


def _parser(unit: str) -> Callable[[object], float]:
    if unit in _BYTE_UNITS:
        return units.parse_bytes
    if unit.endswith(("FLOP/s", "OP/s")):
        return units.parse_flops
    if unit.endswith("/s"):
        return units.parse_bandwidth
    if unit.endswith("W"):
        return units.parse_power
    return units.parse_time
