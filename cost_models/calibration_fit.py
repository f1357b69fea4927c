"""Timings of kernels and collectives to the figures that the cost model's own formulas need.

Every fit evaluates the formulas of `compute` and `collectives` themselves and moves their constants until the sum of
`|log(predicted / measured)|` is least: relative errors count alike for microseconds and seconds, and a run that was
disturbed counts no more than another. Fits of several constants are by Marquardt, "An algorithm for least-squares
estimation of nonlinear parameters", J. SIAM 11(2), 1963.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from cost_models.collectives import collective_s, host_s
from cost_models.compute import attention_s, convolution_product, matmul_s, memory_bound_s
from cost_models.device import DeviceSpec
from cost_models.errors import CostModelError
from cost_models.node import Level
from cost_models.topology import Hop, axis_hops

Sample = Mapping[str, Any]

_STREAMED_BYTES = 12 * 2**20
"""Three tensors of 4 MiB: smaller ones stay in caches that one core has to itself."""

_SMALL_BYTES, _LARGE_BYTES, _ROUNDS = 2**14, 2**20, 3
_SAME_EFFICIENCY = 0.03
"""Collectives whose bandwidth differs by less than this share from the all-reduce's have no figure of their own."""

_STEPS, _SLOPE, _EXACT, _LARGEST_STEP, _HOPELESS = 200, 1e-4, 1e-3, 1.0, 1e9
"""Of the search: steps, difference for slopes, residual that is as good as none, largest step, damping to end at; the
unit is the natural logarithm of a constant."""

_BUSY = 1.5
"""Launches' times that a GPU's kernel takes at least to count as held up by memory."""

_ISSUED = 2.0
"""Times a short one of its kind that a GPU's kernel takes at least to count as one that the host does not hold up."""

_NEGLIGIBLE = 0.25
"""New memory that costs less than this share of writing it is not told apart from noise."""


@dataclass(frozen=True)
class Fitted:
    """One constant found, in SI units, and how well it stands for what was timed."""

    figure: str
    value: float
    unit: str
    spread: float
    """Half the distance between the quartiles of the runs it comes from, over their median; the largest sample's."""

    error: float
    """Median of |predicted / measured - 1| over the samples."""

    samples: int


def median_s(sample: Sample) -> float:
    """Return the median seconds of a sample."""
    return float(statistics.median(sample["seconds"]))


def spread(samples: Sequence[Sample]) -> float:
    """Return the median over samples of half the interquartile range over the median."""
    found = [quartile_spread(sample["seconds"]) for sample in samples]
    return statistics.median(found) if found else 0.0


def quartile_spread(values: Sequence[float]) -> float:
    """Return half the interquartile range over the median."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float((high - low) / 2 / middle)


def fit_device(base: DeviceSpec, kernels: Sequence[Sample]) -> tuple[DeviceSpec, list[Fitted]]:
    """Return the device with the constants that the timed kernels show, and those constants.

    What was not timed keeps its value. Raises `CostModelError` where the kernels lack what every fit needs.
    """
    by = {name: _of_device(base, [each for each in kernels if each["kernel"] == name]) for name in _KERNELS}
    for name in ("launch", "elementwise", "matmul"):
        if not by[name]:
            raise CostModelError(f"no timed kernel {name!r}; known: {', '.join(_KERNELS)}")
    device, found = _fit_memory(base, by["launch"], by["elementwise"])
    for samples, fit in ((by["fresh"], _fit_fresh), (by["exp"], _fit_exp)):
        if samples:
            device, new = fit(device, samples)
            found += new
    device, new = _fit_matmuls(device, by["matmul"])
    found += new
    if by["convolution"]:
        device, new = _fit_convolutions(device, by["convolution"])
        found += new
    if by["attention"]:
        device, new = _fit_attention(device, by["attention"])
        found += new
    return device, found


def _of_device(device: DeviceSpec, samples: Sequence[Sample]) -> list[Sample]:
    """Return the kernels whose time is the device's own: on a GPU those that take longer than the host to issue them.

    The shorter ones of a kind and pass tell how long that is: a quarter of what is measured is small enough to.
    """
    if device.kind != "gpu" or not samples or samples[0]["kernel"] not in _COMPUTES:
        return list(samples)
    passes = {id(each): (each["dtype"], each.get("of", "")) for each in samples}
    timed = {which: [median_s(each) for each in samples if passes[id(each)] == which] for which in passes.values()}
    issued_s = {which: float(np.quantile(seconds, 0.25)) for which, seconds in timed.items()}
    found = [each for each in samples if median_s(each) > _ISSUED * issued_s[passes[id(each)]]]
    return found or [max(samples, key=median_s)]


_COMPUTES = frozenset({"matmul", "convolution", "attention"})

_KERNELS = ("launch", "elementwise", "fresh", "exp", "matmul", "convolution", "attention")


def _fit_memory(
    device: DeviceSpec, launch: Sequence[Sample], streams: Sequence[Sample]
) -> tuple[DeviceSpec, list[Fitted]]:
    large = [each for each in streams if each["bytes"] >= _STREAMED_BYTES] or streams[-1:]
    launch_s = statistics.median(map(median_s, launch))
    if device.kind == "gpu":
        return _fit_gpu_memory(replace(device, kernel_launch_s=launch_s), launch, streams)
    bare = replace(device, kernel_launch_s=launch_s, memory_half_bytes=0.0)
    rate = statistics.median(each["bytes"] / max(median_s(each) - launch_s, 1e-9) for each in large)
    bare = _with_bandwidth(bare, rate)
    # What small kernels take beyond launch and traffic, as bytes at the rate of large ones.
    half = max(0.0, statistics.median((median_s(each) - launch_s) * rate - each["bytes"] for each in streams[:2]))
    fitted = replace(bare, memory_half_bytes=float(round(half)))
    error = _error(streams, lambda each: float(memory_bound_s(each["bytes"], fitted)))
    return fitted, [
        Fitted("kernel_launch", launch_s, "s", spread(launch), 0.0, len(launch)),
        Fitted("memory_bandwidth", rate, "B/s", spread(large), error, len(large)),
        Fitted("memory_half", half, "B", spread(streams[:2]), error, len(streams[:2])),
    ]


def _fit_gpu_memory(
    device: DeviceSpec, launch: Sequence[Sample], streams: Sequence[Sample]
) -> tuple[DeviceSpec, list[Fitted]]:
    """Fit rate and start-up to the kernels that the host does not hold up, whose launches hide behind those before."""
    long = [each for each in streams if median_s(each) > _BUSY * device.kernel_launch_s] or streams[-1:]
    seconds = np.array([median_s(each) for each in long])
    moved = np.array([each["bytes"] for each in long], dtype=np.float64)

    def made(now: Mapping[str, float]) -> DeviceSpec:
        return replace(_with_bandwidth(device, now["rate"]), memory_half_bytes=float(round(now["half"])))

    start = {"rate": float(np.max(moved / seconds)), "half": max(1.0, device.memory_half_bytes)}
    best = least_error(lambda now: memory_bound_s(moved, made(now)), seconds, start)
    fitted = made(best)
    error = _error(streams, lambda each: float(memory_bound_s(each["bytes"], fitted)))
    return fitted, [
        Fitted("kernel_launch", device.kernel_launch_s, "s", spread(launch), 0.0, len(launch)),
        Fitted("memory_bandwidth", best["rate"], "B/s", spread(long), error, len(long)),
        Fitted("memory_half", best["half"], "B", spread(long), error, len(long)),
    ]


def _with_bandwidth(device: DeviceSpec, achieved: float) -> DeviceSpec:
    nominal = max(device.memory_bytes_per_s, achieved)
    return replace(device, memory_bytes_per_s=nominal, memory_efficiency=achieved / nominal)


def _fit_fresh(device: DeviceSpec, samples: Sequence[Sample]) -> tuple[DeviceSpec, list[Fitted]]:
    extra = {each["bytes"]: (median_s(each) - statistics.median(each["old_s"])) / each["bytes"] for each in samples}
    largest = extra[max(extra)]
    if largest * device.memory_bytes_per_s * device.memory_efficiency < _NEGLIGIBLE:
        return replace(device, fresh_bytes=0, fresh_bytes_per_s=0.0), []
    first = min(size for size in extra if all(extra[s] > largest / 2 for s in extra if s >= size))
    rate = 1 / statistics.median(value for size, value in extra.items() if size >= first)
    error = _error(
        [each for each in samples if each["bytes"] >= first],
        lambda each: statistics.median(each["old_s"]) + each["bytes"] / rate,
    )
    of = [each for each in samples if each["bytes"] >= first]
    return replace(device, fresh_bytes=int(first), fresh_bytes_per_s=rate), [
        Fitted("fresh_size", float(first), "B", 0.0, 0.0, len(samples)),
        Fitted("fresh_bandwidth", rate, "B/s", spread(of), error, len(of)),
    ]


def _fit_exp(device: DeviceSpec, samples: Sequence[Sample]) -> tuple[DeviceSpec, list[Fitted]]:
    if device.kind == "gpu":
        return device, []  # hidden behind memory traffic
    start_s = device.kernel_launch_s + device.memory_half_bytes / (device.memory_bytes_per_s * device.memory_efficiency)
    rate = statistics.median(each["elements"] / (median_s(each) - start_s) for each in samples)
    return replace(device, transcendentals_per_s=rate), [
        Fitted("transcendentals", rate, "1/s", spread(samples), 0.0, len(samples))
    ]


def _fit_matmuls(
    device: DeviceSpec, samples: Sequence[Sample], figure: str = "matmul"
) -> tuple[DeviceSpec, list[Fitted]]:
    """Fit the sizes of half rate to the first type measured, the fraction of peak to each."""
    found: list[Fitted] = []
    for place, dtype in enumerate(dict.fromkeys(each["dtype"] for each in samples)):
        if dtype not in device.peak_flops:
            continue
        of = [each for each in samples if each["dtype"] == dtype]
        # Of a GPU's convolutions time goes to bringing planes into another order too, which no size of half rate tells.
        fixed = bool(place) or (device.kind == "gpu" and figure == "convolution")
        halves = {} if fixed else _halves(device)

        b, m, n, k = np.array([each["sizes"] for each in of], dtype=np.float64).T
        seconds = np.array([median_s(each) for each in of])
        predicted = partial(_matmul_s, device, dtype, (b, m, n, k))

        start = {"efficiency": device.matmul_efficiency_for(dtype), **halves}
        best = least_error(predicted, seconds, start)
        device = _with_matmul(device, dtype, best)
        half_m, half_n, half_k = map(round, device.matmul_half)
        device = replace(device, matmul_half=(half_m, half_n, half_k))
        error = _median_error(predicted(best), seconds)
        peak = device.flops_for(dtype) * device.matmul_efficiency_for(dtype)
        found.append(Fitted(f"{figure}.{dtype}", peak, "FLOP/s", spread(of), error, len(of)))
        found += [Fitted(f"{figure}_half_{name}", best[name], "count", spread(of), error, len(of)) for name in halves]
    return device, found


def _matmul_s(device: DeviceSpec, dtype: str, sizes: Sequence[Any], now: Mapping[str, float]) -> Any:
    b, m, n, k = sizes
    return matmul_s(b, m, n, k, dtype, _with_matmul(device, dtype, now))


def _halves(device: DeviceSpec) -> dict[str, float]:
    names = "k" if device.multiprocessors else "mnk"
    return {name: max(1.0, float(device.matmul_half["mnk".index(name)])) for name in names}


def _with_matmul(device: DeviceSpec, dtype: str, now: Mapping[str, float]) -> DeviceSpec:
    peak = device.peak_flops[dtype]
    achieved = peak * now["efficiency"]
    nominal = max(peak, achieved)
    m, n, k = (now.get(name, device.matmul_half[i]) for i, name in enumerate("mnk"))
    return replace(
        device,
        peak_flops={**device.peak_flops, dtype: nominal},
        matmul_efficiency={**device.matmul_efficiency, dtype: achieved / nominal},
        matmul_half=(m, n, k),
        matmul_best={key: share for key, share in device.matmul_best.items() if key != dtype},
    )


def _fit_convolutions(device: DeviceSpec, samples: Sequence[Sample]) -> tuple[DeviceSpec, list[Fitted]]:
    """Fit what products are fitted to, to the products that convolutions are: another library computes these."""
    products = [
        {**each, "sizes": convolution_product(each["pixels"], each["weight"], each["of"])}
        for each in samples
        if each["dtype"] in device.peak_flops
    ]
    fitted, found = _fit_matmuls(device, products, "convolution")
    efficiencies = {each["dtype"]: fitted.matmul_efficiency_for(each["dtype"]) for each in products}
    for dtype in efficiencies:
        device = _at_peak(device, dtype, fitted.peak_flops[dtype])
    return replace(device, convolution_efficiency=efficiencies, convolution_half=fitted.matmul_half), found


def _at_peak(device: DeviceSpec, dtype: str, peak: float) -> DeviceSpec:
    """Return the device with another nominal peak of a type, which products reach as much of as before."""
    scale = device.peak_flops[dtype] / peak
    shares = {**device.matmul_efficiency, dtype: device.matmul_efficiency_for(dtype) * scale}
    return replace(device, peak_flops={**device.peak_flops, dtype: peak}, matmul_efficiency=shares)


def _fit_attention(device: DeviceSpec, samples: Sequence[Sample]) -> tuple[DeviceSpec, list[Fitted]]:
    of = [each for each in samples if each["dtype"] in device.peak_flops]
    seconds = np.array([median_s(each) for each in of])
    # What was timed is what torch chooses there: no other library's figure stands beside it.
    alone = replace(device, vendor_attention_efficiency=0.0)

    def predicted(now: Mapping[str, float]) -> Any:
        fitted = replace(alone, attention_efficiency=now["efficiency"], attention_half=now["half"])
        seen = [each.get("positions", float("inf")) for each in of]
        made = [attention_s(e["flops"], e["bytes"], e["dtype"], fitted, keys) for e, keys in zip(of, seen, strict=True)]
        return np.array([float(each) for each in made])

    if not of:
        return device, []
    start = {"efficiency": device.attention_efficiency}
    half = {"half": max(1.0, device.attention_half)} if len({each.get("positions") for each in of}) > 1 else {}
    fixed = {"half": device.attention_half}
    best = fixed | least_error(lambda now: predicted({**fixed, **now}), seconds, start | half)
    best["efficiency"] = min(1.0, best["efficiency"])
    error = _median_error(predicted(best), seconds)
    found = [Fitted("attention_efficiency", best["efficiency"], "fraction", spread(of), error, len(of))]
    found += [Fitted("attention_half", best["half"], "count", spread(of), error, len(of))] if half else []
    return replace(alone, attention_efficiency=best["efficiency"], attention_half=best["half"]), found


def fit_level(levels: Sequence[Level], at: int, samples: Sequence[Sample]) -> tuple[Level, list[Fitted]]:
    """Return level `at` with latency, overhead and bandwidth by collective that the samples show, and these constants.

    A sample whose `ranks` are those of the level crosses it alone; one of more ranks crosses the levels inside too,
    whose constants stay as they are.
    """
    alone = [each for each in samples if not each.get("beside")]
    ops = tuple(dict.fromkeys(each["op"] for each in alone))
    if not ops:
        raise CostModelError(f"no timed collective on level {levels[at].name!r}")
    timed = _Timed(levels, at, alone, ops)
    best = timed.best()
    fitted = timed.made(best)
    others = {op: e for op, e in fitted.efficiency_of.items() if abs(e / fitted.efficiency - 1) > _SAME_EFFICIENCY}
    fitted = replace(fitted, efficiency_of=others)
    found = timed.figures(best, fitted)
    fitted, new = _fit_host(levels, at, fitted, [each for each in samples if each.get("beside")])
    return fitted, found + new


@dataclass(frozen=True)
class _Timed:
    """Collectives of some kinds that were timed on one level, nothing beside them."""

    levels: Sequence[Level]
    at: int
    alone: Sequence[Sample]
    ops: tuple[str, ...]

    @cached_property
    def seconds(self) -> Any:
        """Return what each took."""
        return np.array([median_s(each) for each in self.alone])

    @cached_property
    def sizes(self) -> Any:
        """Return the bytes of each."""
        return np.array([each["bytes"] for each in self.alone])

    @cached_property
    def small(self) -> list[Sample]:
        """Return those whose bytes hardly matter; all where there are none."""
        return [each for each in self.alone if each["bytes"] <= _SMALL_BYTES] or list(self.alone)

    def made(self, now: Mapping[str, float]) -> Level:
        """Return the level with these constants."""
        of = {op: min(1.0, now[f"efficiency.{op}"]) for op in self.ops}
        base = of["all_reduce" if "all_reduce" in of else self.ops[0]]
        level = self.levels[self.at]
        return replace(level, latency_s=now["latency"], call_s=now["call"], efficiency=base, efficiency_of=of)

    def predicted(self, now: Mapping[str, float]) -> Any:
        """Return what each takes with these constants."""
        fitted = self.made(now)
        ranks = {each["ranks"] for each in self.alone}
        hops = {count: _hops(self.levels, self.at, fitted, count) for count in ranks}
        return np.array([collective_s(each["op"], each["bytes"], hops[each["ranks"]]) for each in self.alone])

    def best(self) -> dict[str, float]:
        """Return the constants under which what is predicted is nearest to what was measured."""
        level = self.levels[self.at]
        best = {
            "latency": level.latency_s or 1e-6,
            "call": level.call_s or 1e-6,
            **{f"efficiency.{op}": level.efficiency for op in self.ops},
        }
        of_small: tuple[str, ...] = ("latency", "call")
        if all("host_s" in each for each in self.small):  # what a call takes from its own core was timed
            best["call"] = statistics.median(each["host_s"] for each in self.small)
            of_small = ("latency",)
        sizes = self.sizes
        for _ in range(_ROUNDS):
            # Small messages tell latency, large ones bandwidth; between them, buffers and bursts hide either.
            for some, names in ((sizes <= _SMALL_BYTES, of_small), (sizes >= _LARGE_BYTES, tuple(best)[2:])):
                of_size = some if some.any() else np.ones_like(some)
                best |= least_error(
                    lambda now, some=of_size, best=dict(best): self.predicted({**best, **now})[some],  # type: ignore[misc]
                    self.seconds[of_size],
                    {name: best[name] for name in names},
                )
        return best

    def figures(self, best: Mapping[str, float], fitted: Level) -> list[Fitted]:
        """Return the constants with the spread of what they come from and the error that is left."""
        predicted, seconds, few = self.predicted(best), self.seconds, self.sizes <= _SMALL_BYTES
        error = _median_error(predicted[few], seconds[few])
        found = [
            Fitted("latency", fitted.latency_s, "s", spread(self.small), error, len(self.small)),
            Fitted("call_overhead", fitted.call_s, "s", spread(self.small), error, len(self.small)),
        ]
        for op in self.ops:
            of = [i for i, each in enumerate(self.alone) if each["op"] == op and each["bytes"] >= _LARGE_BYTES]
            of = of or [i for i, each in enumerate(self.alone) if each["op"] == op]
            own = fitted.bytes_per_s * fitted.efficiency_of.get(op, fitted.efficiency)
            error = _median_error(predicted[of], seconds[of])
            found.append(Fitted(f"bandwidth.{op}", own, "B/s", spread([self.alone[i] for i in of]), error, len(of)))
        return found


def _fit_host(levels: Sequence[Level], at: int, level: Level, beside: Sequence[Sample]) -> tuple[Level, list[Fitted]]:
    """Fit what a computing core spends on a byte: by how much matmuls end later with a collective behind them."""
    unit = replace(level, host_bytes_per_s=1.0)
    rates = []
    for each in beside:
        delay_s = median_s(each) - each["compute_s"] - level.call_s
        sent = host_s(each["op"], each["bytes"], _hops(levels, at, unit, each["ranks"]))
        rates.append(delay_s / sent)
    if not rates or statistics.median(rates) <= 0:
        return level, []
    value = 1 / statistics.median(rates)
    error = statistics.median(abs(rate * value - 1) for rate in rates)
    return replace(level, host_bytes_per_s=value), [
        Fitted("host_bandwidth", value, "B/s", spread(beside), error, len(beside))
    ]


def _hops(levels: Sequence[Level], at: int, level: Level, ranks: int) -> tuple[Hop, ...]:
    if ranks == level.fanout:
        return axis_hops((level,), (ranks,), 0)
    return axis_hops((*levels[:at], level), (ranks,), 0)


def least_error(
    predicted: Callable[[Mapping[str, float]], Any], measured: Any, start: Mapping[str, float]
) -> dict[str, float]:
    """Return the constants above 0 with the least sum of |log(predicted / measured)| that is found from `start`.

    Levenberg-Marquardt on logarithms, residuals weighted by their inverses, which turns squares into magnitudes.
    """
    names = list(start)

    def residuals(at: Any) -> Any:
        now = {name: float(value) for name, value in zip(names, np.exp(at), strict=True)}
        return np.log(np.maximum(predicted(now), 1e-12) / measured)

    here = np.log([start[name] for name in names])
    off = residuals(here)
    damping = 1.0
    for _ in range(_STEPS):
        slopes = np.stack([(residuals(here + _SLOPE * unit) - off) / _SLOPE for unit in np.eye(len(names))], axis=1)
        weights = 1 / np.maximum(np.abs(off), _EXACT)
        normal = slopes.T @ (weights[:, None] * slopes)
        step = -np.linalg.solve(normal + damping * np.eye(len(names)) * weights.mean(), slopes.T @ (weights * off))
        there = here + np.clip(step, -_LARGEST_STEP, _LARGEST_STEP)
        after = residuals(there)
        if np.abs(after).sum() < np.abs(off).sum():
            here, off, damping = there, after, max(damping / 4, 1e-9)
        else:
            damping *= 4
            if damping > _HOPELESS:
                break
    return {name: float(value) for name, value in zip(names, np.exp(here), strict=True)}


def _error(samples: Sequence[Sample], predicted: Callable[[Sample], float]) -> float:
    return statistics.median(abs(predicted(each) / median_s(each) - 1) for each in samples)


def _median_error(predicted: Any, measured: Any) -> float:
    return float(np.median(np.abs(predicted / measured - 1)))
