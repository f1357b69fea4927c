"""How far the cost model is from published collectives and matmuls, and from hardware that it was not fitted to.

    python -m benchmarks.accuracy --write    # benchmarks/results/accuracy.jsonl and the tables of docs/accuracy/

Leave one hardware out: the fitted constants are fitted again without any row of one device, from the same neutral
start, and price that device's rows; what only its rows could tell (the efficiency of its own link, the latency of its
own adapter) is taken as the mean over the fabrics that remain.

Other sizes: fitted to every second row of a hardware, tested on the rows between.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

from benchmarks import record
from cost_models.collectives import collective_s
from cost_models.compute import matmul_s
from cost_models.device import DeviceSpec, catalogued_device
from cost_models.errors import CostModelError
from cost_models.library import nccl
from cost_models.published import MIB, Collective, collective_cluster, device_named, price_matmul, read_collective
from cost_models.topology import Hop, axis_hops
from cost_models.validation import Validation, validate

DATA = record.ROOT / "benchmarks" / "data"

NEUTRAL: Mapping[str, float] = {
    "latency_s": 3e-6,
    "call_s": 25e-6,
    "in_switch_efficiency": 0.8,
    "chunk_fill": 1.0,
    "fill_limit": 5.0,
    "ring_latency_factor": 2.0,
}
"""Where the fit starts; the efficiency of every link at 0.8, the latency of every adapter at 20 us."""

FAMILIES = {
    "ampere": ("a100-sxm-80gb", "a100-pcie-80gb"),
    "hopper": ("h100-sxm-80gb", "h200", "gh200"),
    "blackwell": ("b200", "b300", "gb200"),
    "cdna 3 and 4": ("mi300x", "mi325x", "mi355x"),
}
Row = tuple[Collective, str, str, str, tuple[Hop, ...]]
"""A row with its device, link, adapter and the levels that it crosses."""


def main() -> None:
    """Measure, print as JSON lines and, with `--write`, renew the results and the tables of the documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    results = record.RESULTS / "accuracy.jsonl" if write else None
    if results is not None:
        results.unlink(missing_ok=True)
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, rows in (
        ("collectives", list(collectives_by_hardware())),
        ("worst collectives", list(worst(validate(DATA / "collectives.csv")))),
        ("collectives left out", list(collectives_left_out())),
        ("collectives of other sizes", list(collectives_of_other_sizes())),
        ("matmuls", list(matmuls())),
    ):
        tables[name] = rows
        for row in rows:
            record.write({"table": name, **row}, results)
    if write:
        columns = {name: [each for each in rows[0] if each != "fitted without it"] for name, rows in tables.items()}
        record.renew({name: record.markdown(rows, columns[name]) for name, rows in tables.items()})


def collectives_by_hardware() -> Iterator[dict[str, Any]]:
    """Yield the errors of every hardware of `collectives.csv`, then of all."""
    found = validate(DATA / "collectives.csv")
    hardware = {each.line: each.group.split("|")[0].partition(",")[0] for each in found.priced}
    for name in [*dict.fromkeys(hardware.values()), "all"]:
        rows = [each for each in found.priced if name in ("all", hardware[each.line])]
        small = [abs(each.error) for each in rows if each.part == "below 1 MiB"]
        large = [abs(each.error) for each in rows if each.part != "below 1 MiB"]
        yield {
            "hardware": name,
            "rows": len(rows),
            "mean below 1 MiB": _percent(small),
            "mean from 1 MiB": _percent(large),
            "median": f"{median(abs(each.error) for each in rows):.1%}",
            "bias": f"{mean(each.error for each in rows):+.1%}",
        }


def worst(found: Validation) -> Iterator[dict[str, Any]]:
    """Yield the rows of largest error."""
    for each in sorted(found.priced, key=lambda each: -abs(each.error))[:8]:
        yield {
            "line": each.line,
            "row": each.label,
            "measured us": round(each.measured_s * 1e6, 1),
            "predicted us": round(each.predicted_s * 1e6, 1),
            "error": f"{each.error:+.0%}",
        }


def collectives_of_other_sizes() -> Iterator[dict[str, Any]]:
    """Yield the errors of every second row under a fit to the others, and the other way round."""
    rows = list(_collective_rows())
    position = {id(row): place for _, group in _by_hardware(rows).items() for place, row in enumerate(group)}
    for half, name in enumerate(("1st, 3rd, 5th ...", "2nd, 4th, 6th ...")):
        tested = [row for row in rows if position[id(row)] % 2 == half]
        fitted = fit([row for row in rows if position[id(row)] % 2 != half])
        yield _left_out(name, {large: _errors(tested, fitted, large) for large in (True, False)}, fitted)


def _by_hardware(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row[0].hardware}|{row[0].nodes}", []).append(row)
    return groups


def _errors(rows: Sequence[Row], constants: Mapping[str, float], large: bool) -> list[float]:
    """Return the absolute relative errors of the rows from 1 MiB (`large`) or below it."""
    fitting = [row for row in rows if (row[0].size_bytes >= MIB) is large]
    return [abs(_predicted_s(row, constants) / row[0].measured_s - 1) for row in fitting]


def collectives_left_out() -> Iterator[dict[str, Any]]:
    """Yield, for each device of `collectives.csv`, the errors of its rows under a fit without them."""
    rows = list(_collective_rows())
    errors: dict[bool, list[float]] = {True: [], False: []}
    for left_out in dict.fromkeys(device for _, device, *_ in rows):
        fitted = fit([row for row in rows if row[1] != left_out])
        own = [row for row in rows if row[1] == left_out]
        tested = {large: _errors(own, fitted, large) for large in (True, False)}
        for large, each in tested.items():
            errors[large] += each
        yield _left_out(left_out, tested, fitted)
    yield _left_out("all", errors, {})


def _left_out(device: str, errors: Mapping[bool, list[float]], fitted: Mapping[str, float]) -> dict[str, Any]:
    return {
        "left out": device,
        "rows": sum(map(len, errors.values())),
        "mean below 1 MiB": _percent(errors[False]),
        "mean from 1 MiB": _percent(errors[True]),
        "fitted without it": ", ".join(f"{name} {value:.3g}" for name, value in fitted.items()),
    }


def _collective_rows() -> Iterator[Row]:
    with (DATA / "collectives.csv").open(encoding="utf-8") as file:
        for raw in csv.DictReader(file):
            try:
                read = read_collective(raw)
                cluster = collective_cluster(read)
            except CostModelError:
                continue
            node = cluster.groups[0].node
            assert node.links is not None
            nic = node.nic.catalog if node.nic is not None and read.nodes > 1 else ""
            hops = axis_hops(cluster.levels, (read.ranks,), 0)
            yield read, node.device.name, node.links.catalog, nic, hops


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Return the constants with the least mean absolute log error on `rows`, by descent along one constant at a time.

    Rows that took a fifth longer than a larger message of the same group show warm-up,
    not the fabric, and are left out of the fit (not of the errors).
    """
    clean = [row for row in rows if not _is_warm_up(row, rows)]
    links = {f"efficiency {link}": 0.8 for _, _, link, _, _ in clean}
    nics = {f"latency_s {nic}": 20e-6 for _, _, _, nic, _ in clean if nic}
    constants = {**NEUTRAL, **links, **nics}
    best, step = _loss(clean, constants), 1.3
    while step > 1.005:
        before = best
        for name in tuple(constants):
            for factor in (step, 1 / step):
                tried = {**constants, name: constants[name] * factor}
                loss = _loss(clean, tried)
                if loss < best and not (name.startswith("efficiency") and tried[name] > 1):
                    constants, best = tried, loss
                    break
        if before - best < 1e-5:
            step = math.sqrt(step)
    return constants


def _is_warm_up(row: Row, rows: Sequence[Row]) -> bool:
    read = row[0]
    return any(
        (other.hardware, other.ranks, other.op) == (read.hardware, read.ranks, read.op)
        and other.size_bytes > read.size_bytes
        and read.measured_s > 1.2 * other.measured_s
        for other, *_ in rows
    )


def _loss(rows: Sequence[Row], constants: Mapping[str, float]) -> float:
    return mean(abs(math.log(_predicted_s(row, constants) / row[0].measured_s)) for row in rows)


def _predicted_s(row: Row, constants: Mapping[str, float]) -> float:
    read, _, link, nic, hops = row
    names = ("in_switch_efficiency", "chunk_fill", "fill_limit", "ring_latency_factor")
    known: dict[str, Any] = {name: constants[name] for name in names}
    library = replace(nccl(), **known)
    call_s = constants["call_s"]
    priced = []
    for hop in hops:
        own: dict[str, Any]
        if hop.level == "node":
            own = {"efficiency": _known(constants, "efficiency", link), "latency_s": constants["latency_s"]}
        else:
            own = {"latency_s": _known(constants, "latency_s", nic)}
        priced.append(replace(hop, library=library, call_s=call_s, **own))
    return float(collective_s(read.op, read.size_bytes, priced, read.algorithm))


def _known(constants: Mapping[str, float], kind: str, name: str) -> float:
    """Return the constant of a fabric; of one that the fit has not seen, the mean of those that it has."""
    seen = [value for key, value in constants.items() if key.startswith(f"{kind} ")]
    return constants.get(f"{kind} {name}", mean(seen))


def matmuls() -> Iterator[dict[str, Any]]:
    """Yield predicted and achieved rates by device, and the prediction with its family's mean efficiency instead."""
    with (DATA / "matmul_achievable.csv").open(encoding="utf-8") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            try:
                found = price_matmul(row, line)
            except CostModelError:
                continue
            m, n, k = (int(size) for size in re.findall(r"\d+", row["best_shape_mxnxk"]))
            rate, dtype = 2 * m * n * k / 1e12, found.group
            device = catalogued_device(device_named(row["gpu"], "gpu"))
            left_out_s = float(matmul_s(1, m, n, k, dtype, _without_own_rows(device, dtype)))
            yield {
                "device": row["gpu"],
                "dtype": dtype,
                "shape": row["best_shape_mxnxk"],
                "achieved TFLOP/s": float(row["achieved"]),
                "predicted TFLOP/s": round(rate / found.predicted_s, 1),
                "error": f"{found.measured_s / found.predicted_s - 1:+.1%}",
                "left out": f"{found.measured_s / left_out_s - 1:+.1%}",
            }


def _without_own_rows(device: DeviceSpec, dtype: str) -> DeviceSpec:
    """Return the device with the mean efficiency of the others of its family; of all others where it has no family."""
    key = {"bf16": "bfloat16"}.get(dtype, dtype)
    family = next(each for each in FAMILIES.values() if device.name in each)
    others = [catalogued_device(name).matmul_efficiency for name in family if name != device.name]
    known = [efficiency[key] for efficiency in others if key in efficiency]
    return replace(device, matmul_efficiency={key: mean(known)}, matmul_best={})


def _percent(errors: Sequence[float]) -> str:
    return f"{mean(errors):.1%}" if errors else ""


if __name__ == "__main__":
    main()
