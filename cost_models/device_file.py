"""A device as the cluster file describes it, and the trap of sparse figures.

Data sheets from Ampere on print compute with 2:4 sparsity, twice the dense rate.
Taken for dense, every plan would be computed twice too fast; such a figure is
refused where the device can be recognised.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf, log
from typing import Any

from cost_models import catalog, units
from cost_models.device import DTYPE_ALIASES, DTYPE_BYTES, DeviceSpec, canonical_dtype, catalogued_device, host_of
from cost_models.device_names import series_of
from cost_models.errors import shown, suggestion
from cost_models.section import Section

_KEYS = (
    "preset",
    "catalog",
    "kind",
    "memory",
    "compute",
    "matmul_efficiency",
    "matmul_best",
    "matmul_half",
    "convolution_efficiency",
    "convolution_half",
    "attention_efficiency",
    "vendor_attention_efficiency",
    "attention_half",
    "attention_block",
    "kernel_launch",
    "multiprocessors",
    "transcendentals_per_second",
)
_MEMORY_KEYS = (
    "capacity",
    "bandwidth",
    "efficiency",
    "half_rate_size",
    "reserved",
    "fresh_size",
    "fresh_bandwidth",
)
_SPARSE_TOLERANCE = 0.02
_PLAUSIBLE_OVER_PRESET = 1.25
"""A figure may exceed its preset's by this much: boost clocks, another form factor."""

# For a device that is described without a preset: the fractions of an A100 (gpu)
# or of one core (cpu), which the file can override. Assumed.
_GENERIC = {"gpu": "a100-sxm-80gb", "cpu": "cpu"}


_SAME_SERIES = 2.5
"""Figures of one series differ by this much from a member to the next: a chip's halves, a generation."""


def read_device(name: str, section: Section) -> DeviceSpec:
    """Return the device `name` of a cluster file."""
    section.only(*_KEYS)
    memory = section.section("memory").only(*_MEMORY_KEYS)
    peaks = _compute(section.section("compute"))
    base = _base(name, section, peaks)
    _refuse_implausible(base.kind, _recognised(name, section, memory), section, peaks)
    if "preset" in section:
        _refuse_another_memory(section.text("preset"), memory)
    inherits = "preset" in section
    efficiencies, default_efficiency = _efficiencies(section.section("matmul_efficiency"), base)
    touched = set(section.data) - {"preset"}
    launch_s = section.quantity("kernel_launch", units.parse_time, base.kernel_launch_s)
    return replace(
        base,
        name=name,
        memory_bytes=_or_base(memory, "capacity", units.parse_bytes, base.memory_bytes),
        memory_bytes_per_s=_or_base(memory, "bandwidth", units.parse_bandwidth, base.memory_bytes_per_s),
        memory_efficiency=memory.share("efficiency", base.memory_efficiency),
        memory_half_bytes=float(memory.quantity("half_rate_size", units.parse_bytes, round(base.memory_half_bytes))),
        reserved_bytes=memory.quantity("reserved", units.parse_bytes, base.reserved_bytes),
        fresh_bytes=memory.quantity("fresh_size", units.parse_bytes, base.fresh_bytes),
        fresh_bytes_per_s=memory.quantity("fresh_bandwidth", units.parse_bandwidth, base.fresh_bytes_per_s),
        peak_flops={**base.peak_flops, **peaks},
        matmul_efficiency=efficiencies,
        default_matmul_efficiency=default_efficiency,
        matmul_best=_best(section, base),
        matmul_half=_half(section, "matmul_half", base.matmul_half),
        convolution_efficiency=_fractions(section, "convolution_efficiency", base.convolution_efficiency),
        convolution_half=_half(section, "convolution_half", base.convolution_half),
        attention_efficiency=section.share("attention_efficiency", base.attention_efficiency),
        vendor_attention_efficiency=_of_vendor(section, base),
        attention_half=_keys(section, base.attention_half),
        attention_block=section.count("attention_block") if "attention_block" in section else base.attention_block,
        kernel_launch_s=launch_s,
        host_s=host_of(base.kind, launch_s),
        transcendentals_per_s=_transcendentals(section, base.transcendentals_per_s),
        multiprocessors=_multiprocessors(section, base.multiprocessors),
        catalog=_catalog_name(section) if not inherits or touched else base.catalog,
    )


def device_document(device: DeviceSpec) -> dict[str, Any]:
    """Return the section of a cluster file that `read_device` reads back as `device`."""
    document: dict[str, Any] = {
        "kind": device.kind,
        "memory": {
            "capacity": units.exact_bytes(device.memory_bytes),
            "bandwidth": units.exact_bandwidth(device.memory_bytes_per_s),
            "efficiency": device.memory_efficiency,
            "half_rate_size": units.exact_bytes(round(device.memory_half_bytes)),
            "reserved": units.exact_bytes(device.reserved_bytes),
            "fresh_size": units.exact_bytes(device.fresh_bytes),
            "fresh_bandwidth": units.exact_bandwidth(device.fresh_bytes_per_s),
        },
        "compute": {dtype: units.exact_flops(rate) for dtype, rate in device.peak_flops.items()},
        "matmul_efficiency": {**device.matmul_efficiency, "default": device.default_matmul_efficiency},
        "matmul_half": list(device.matmul_half),
        "attention_efficiency": device.attention_efficiency,
        "attention_half": device.attention_half,
        "attention_block": device.attention_block,
        "kernel_launch": units.exact_seconds(device.kernel_launch_s),
        "multiprocessors": device.multiprocessors,
        "transcendentals_per_second": device.transcendentals_per_s,
    }
    if device.matmul_best:
        document["matmul_best"] = dict(device.matmul_best)
    if device.convolution_efficiency:
        document["convolution_efficiency"] = dict(device.convolution_efficiency)
        document["convolution_half"] = list(device.convolution_half)
    if device.catalog:
        document["catalog"] = device.catalog
    elif device.vendor_attention_efficiency:
        document["vendor_attention_efficiency"] = device.vendor_attention_efficiency
    return document


def _of_vendor(section: Section, base: DeviceSpec) -> float:
    """Return the rate of the vendor's attention; 0 where a file says what attention does, and nothing of that."""
    name = "vendor_attention_efficiency"
    said = "attention_efficiency" in section and not _catalog_name(section)
    return section.share(name, 1.0) if name in section else 0.0 if said else base.vendor_attention_efficiency


def _base(name: str, section: Section, peaks: dict[str, float]) -> DeviceSpec:
    """Return the device whose figures hold where the section is silent.

    The preset; else the catalogue device with the same bandwidth and rates; else the efficiencies of the nearest of its
    series, by name, or of a generic one, both without tile quantisation.
    """
    if "preset" in section:
        preset = section.text("preset")
        if preset not in catalog.names("devices"):
            raise section.error(str(catalog.unknown_entry("devices", preset)), "preset")
        base = catalogued_device(preset)
        return replace(base, kind=section.choice("kind", _GENERIC, base.kind))
    section.require("memory", "compute", example="{preset: h100-sxm-80gb}")
    section.section("memory").require("capacity", "bandwidth", example="{capacity: 80GiB, bandwidth: 2039GB/s}")
    if not section.section("compute").data:
        raise section.error("names no rate; give at least one, such as {bf16: 312TFLOP/s}", "compute")
    kind = section.choice("kind", _GENERIC, "gpu")
    bandwidth = section.section("memory").positive("bandwidth", units.parse_bandwidth)
    series = _known_series(name)
    for each in map(catalogued_device, catalog.names("devices")):
        if series and series_of(each.name) != series:
            continue
        same_rates = all(_close(rate, each.peak_flops.get(dtype, 0.0)) for dtype, rate in peaks.items())
        if each.kind == kind and same_rates and _close(bandwidth, each.memory_bytes_per_s):
            return replace(each, peak_flops={})
    if kind == "gpu" and (kin := _of_series(series, peaks, bandwidth)) is not None:
        return replace(kin, peak_flops={}, multiprocessors=0)
    return replace(catalogued_device(_GENERIC[kind]), peak_flops={}, matmul_efficiency={}, multiprocessors=0)


def _known_series(name: str) -> str:
    """Return the series that a name tells, if the catalogue has any of it; else empty."""
    series = series_of(name)
    return series if series in map(series_of, catalog.names("devices")) else ""


def _of_series(series: str, peaks: Mapping[str, float], bandwidth: float) -> DeviceSpec | None:
    """Return the device of the catalogue of a series (`mi` of `mi350x`) whose figures are nearest.

    Libraries are written for a series, and are as far from the peaks of all of it. None where no device of that series
    has figures within `_SAME_SERIES` of these: a name may be anybody's.
    """
    found: list[tuple[float, str]] = []
    for each in catalog.names("devices"):
        spec = catalogued_device(each)
        shared = [abs(log(rate / spec.peak_flops[dtype])) for dtype, rate in peaks.items() if dtype in spec.peak_flops]
        if series_of(each) == series and shared:
            found.append((max(*shared, abs(log(bandwidth / spec.memory_bytes_per_s))), each))
    far, nearest = min(found, default=(inf, ""))
    return catalogued_device(nearest) if far <= log(_SAME_SERIES) else None


def _or_base(section: Section, key: str, parse: Any, base: Any) -> Any:
    return section.positive(key, parse) if key in section else base


def _keys(section: Section, default: float) -> float:
    value = section.number("attention_half", default)
    if value < 0:
        raise section.error(
            f"must be a number of keys, 0 where any number is as good, but is {value!r}", "attention_half"
        )
    return value


def _transcendentals(section: Section, default: float) -> float:
    key = "transcendentals_per_second"
    value = section.number(key, default)
    if value < 0:
        raise section.error(f"must be a number a second, 0 where they take no time of their own, but is {value!r}", key)
    return value


def _multiprocessors(section: Section, default: int) -> int:
    if section.data.get("multiprocessors", default) == 0:
        return 0
    return section.count("multiprocessors") if "multiprocessors" in section else default


def _compute(section: Section) -> dict[str, float]:
    known = {*DTYPE_BYTES, *DTYPE_ALIASES}
    rates: dict[str, float] = {}
    for key in section.data:
        if canonical_dtype(key) not in DTYPE_BYTES:
            raise section.error(f"unknown data type {key!r}{suggestion(key, known)}; known: {', '.join(DTYPE_BYTES)}")
        if canonical_dtype(key) in rates:
            raise section.error(f"gives {canonical_dtype(key)} twice, the second time as {key!r}")
        rates[canonical_dtype(key)] = section.positive(key, units.parse_flops)
    return rates


def _efficiencies(section: Section, base: DeviceSpec) -> tuple[dict[str, float], float]:
    known = {*DTYPE_BYTES, *DTYPE_ALIASES, "default"}
    found = {} if section.data else dict(base.matmul_efficiency)
    for key in section.data:
        if key not in known:
            raise section.error(f"unknown data type {key!r}{suggestion(key, known)}; known: {', '.join(DTYPE_BYTES)}")
        found[canonical_dtype(key)] = section.share(key, 1.0)
    return found, found.pop("default", base.default_matmul_efficiency)


def _best(section: Section, base: DeviceSpec) -> dict[str, float]:
    """Return the fractions of peak that no product exceeds: as given; else the base's where its efficiencies hold."""
    return _fractions(section, "matmul_best", {} if "matmul_efficiency" in section else base.matmul_best)


def _fractions(section: Section, name: str, default: Mapping[str, float]) -> dict[str, float]:
    """Return the fractions of peak by data type that the section `name` gives; where there is none, `default`."""
    given = section.section(name)
    if name not in section:
        return dict(default)
    for key in given.data:
        if canonical_dtype(key) not in DTYPE_BYTES:
            raise given.error(f"unknown data type {key!r}; known: {', '.join(DTYPE_BYTES)}")
    return {canonical_dtype(key): given.share(key, 1.0) for key in given.data}


def _half(section: Section, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    if name not in section:
        return default
    value = section.data[name]
    is_sizes = isinstance(value, list) and len(value) == 3
    if not is_sizes or not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value):
        raise section.error(f"must be three whole numbers [m, n, k], but is {shown(value)}", name)
    return (value[0], value[1], value[2])


def _catalog_name(section: Section) -> str:
    name = section.text("catalog")
    return name if name in catalog.names("devices") else ""


def _refuse_implausible(
    kind: str, recognised: dict[str, DeviceSpec], section: Section, peaks: dict[str, float]
) -> None:
    """Refuse compute that is a figure with sparsity, or too much for the device that is recognised, or for any.

    The catalogue's CPU is one core of one machine: another one may well do twice as much, and none has sparsity.
    """
    known = {each: spec for each, spec in recognised.items() if kind != "cpu"}
    for key in section.section("compute").data:
        dtype, path = canonical_dtype(key), f"compute.{key}"
        rate = peaks[dtype]
        dense = {each: spec.peak_flops[dtype] for each, spec in known.items() if dtype in spec.peak_flops}
        if any(_close(rate, each) for each in dense.values()):
            continue
        twice = [each for each, value in dense.items() if _close(rate, 2 * value)]
        if twice:
            raise section.error(_sparse_text(rate, twice[0], dense[twice[0]]), path)
        if dense and "preset" in section and rate > _PLAUSIBLE_OVER_PRESET * max(dense.values()):
            raise section.error(_implausible_text(rate, *max(dense.items(), key=lambda x: x[1])), path)
        _refuse_impossible(section, path, dtype, rate)


def _refuse_another_memory(preset: str, memory: Section) -> None:
    """Refuse a capacity or bandwidth of another device than the preset; less is a part of it, or capped.

    A CPU's memory is what its owner put in.
    """
    base = catalogued_device(preset)
    if base.kind == "cpu":
        return
    for key, parse, of_preset, told in (
        ("capacity", units.parse_bytes, base.memory_bytes, units.format_bytes),
        ("bandwidth", units.parse_bandwidth, base.memory_bytes_per_s, units.format_rate),
    ):
        given = memory.positive(key, parse) if key in memory else of_preset
        if given > _PLAUSIBLE_OVER_PRESET * of_preset:
            raise memory.error(
                f"{told(given)} is {given / of_preset:.3g} times the {told(of_preset)} of {preset}; check the unit, "
                "or describe another device without `preset`",
                key,
            )


def _refuse_impossible(section: Section, path: str, dtype: str, rate: float) -> None:
    """Refuse a rate of twice the fastest device of the catalogue and more."""
    peaks = {each: catalogued_device(each).peak_flops.get(dtype, 0.0) for each in catalog.names("devices")}
    fastest = max(peaks, key=peaks.__getitem__)
    if peaks[fastest] and rate > 2 * peaks[fastest]:
        raise section.error(_implausible_text(rate, fastest, peaks[fastest]), path)


def _recognised(name: str, section: Section, memory: Section) -> dict[str, DeviceSpec]:
    """Return the catalogue devices that this section may mean: its preset, or by name or memory."""
    if "preset" in section:
        return {section.text("preset"): catalogued_device(section.text("preset"))}
    family = name.lower().replace("_", "-").split("-")[0]
    bandwidth = memory.positive("bandwidth", units.parse_bandwidth)
    everything = {each: catalogued_device(each) for each in catalog.names("devices")}
    by_name = {each: spec for each, spec in everything.items() if family in each.split("-")}
    by_memory = {each: s for each, s in everything.items() if _close(s.memory_bytes_per_s, bandwidth)}
    return by_name or by_memory


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _SPARSE_TOLERANCE * b


def _sparse_text(rate: float, device: str, dense: float) -> str:
    return (
        f"{units.format_rate(rate, 'FLOP/s')} is the figure of {device} with 2:4 sparsity, twice its dense"
        f" {units.format_rate(dense, 'FLOP/s')}; matmuls of training are dense, so write the dense figure"
    )


def _implausible_text(rate: float, device: str, dense: float) -> str:
    return (
        f"{units.format_rate(rate, 'FLOP/s')} is {rate / dense:.3g} times the dense"
        f" {units.format_rate(dense, 'FLOP/s')} of {device}; check the unit and write the dense figure"
    )
