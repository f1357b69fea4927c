"""Which values of the constants the published training steps ask for, all of them or without one source.

    python -m benchmarks.refit --sensitivities   # results/sensitivities.jsonl: each row with each constant changed
    python -m benchmarks.refit --sensitivities --again NAME  # the rows that the constant concerns, as they are and with
                                                 # it changed; what others change keeps its ratio
    python -m benchmarks.refit                   # fits, of all sources and without each; results/refit.jsonl
    python -m benchmarks.refit --price SOURCE    # the source's rows at the constants fitted without it, for
                                                 # results/training_steps.jsonl (its lines bear `left_out`)

A fit starts from what is known of each constant without these rows and leaves it as far as the rows demand: the least
sum of Huber's loss of ln(predicted / measured) over ROW_SPREAD and of squared distances from what is known over its
spread. Predictions between the priced points are linear in the logarithms of the constants.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.api.validating import estimates_of, price_steps
from benchmarks import record, training_steps
from cost_models import catalog, overlap
from cost_models.errors import CostModelError
from cost_models.training_rows import TrainingRow, read_training_row

SENSITIVITIES = record.RESULTS / "sensitivities.jsonl"
FITS = record.RESULTS / "refit.jsonl"

ROW_SPREAD = 0.07
"""Spread of ln(predicted / measured) that is no surprise."""

HUBER = 1.5
"""In units of ROW_SPREAD, from where on a row pulls no harder."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Constant:
    """A constant that is fitted to training steps: where it is, and what is known of it without them."""

    places: tuple[tuple[str, str, str], ...]
    """Section, entry and key of the catalogue; one value for all."""

    known: float
    spread: float
    """Of its logarithm."""

    most: float
    why: str
    tried: float
    """The other value at which rows are priced, for their sensitivity."""

    concerns: Callable[[TrainingRow], bool]


def _is_early(row: TrainingRow, device: str) -> bool:
    return row.architecture.fused_attention and row.year <= 2023 and row.device.startswith(device)


_FUSED = "stacks", "fused"
CONSTANTS: Mapping[str, Constant] = {
    "sustained": Constant(
        (("stacks", "all", "sustained"),), 0.9, 0.1, 1.0, "clocks under load fall by 5 to 15 %", 0.88, lambda row: True
    ),
    "early attention, A100": Constant(
        tuple(("devices", f"a100-sxm-{size}gb", "early_attention_efficiency") for size in (40, 80)),
        0.36, 0.25, 1.0, "between 25 and 40 % of peak forward, more backward (Dao 2023, of FlashAttention 1)", 0.368,
        lambda row: _is_early(row, "a100"),
    ),
    "early attention, H100": Constant(
        (("devices", "h100-sxm-80gb", "early_attention_efficiency"),),
        0.25, 0.3, 1.0, "as much less as FlashAttention-2 is there (Shah 2024)", 0.23,
        lambda row: _is_early(row, "h100"),
    ),
    "host, fused kernels": Constant(
        ((*_FUSED, "host"),), 15e-6, 1.0, 1e-3, "PyTorch's own host, within a factor of three", 65e-6,
        lambda row: row.stack.kernels == "fused",
    ),
    "fusion, fused kernels": Constant(
        ((*_FUSED, "fusion"),), 0.6, 0.4, 1.0, "some of the traffic, not all", 0.8,
        lambda row: row.stack.kernels == "fused",
    ),
    "host, eager": Constant(
        (("stacks", "eager", "host"),), 15e-6, 0.4, 1e-3, "an operator in 10 to 20 us", 21e-6,
        lambda row: row.stack.kernels == "eager" and row.architecture.hidden <= 1600,
    ),
    "fabric without a name": Constant(
        (("nics", "unnamed", "efficiency"),), 0.75, 0.25, 1.0, "nominal rates lose 5 to 40 %", 0.75,
        lambda row: row.fabric.endswith("per node") and row.gpus > row.gpus_per_node,
    ),
    "accesses beside computation": Constant(
        (("overlap", "gpu", ""),), 3.0, 0.3, 10.0, "a byte on its way is received, read and passed on", 3.0,
        lambda row: (row.zero == 3 and row.dp > 1) or row.stack.overlaps_tensor or row.stack.hides_backward,
    ),
}  # fmt: skip
EARLY = "early"
EARLY_KNOWN, EARLY_SPREAD = 0.1, 0.1
"""The matmul rate that software lacks in a device's first year: what megatron_lm gives, linear; no logarithm."""


@functools.cache
def value_of(name: str) -> float:
    """Return a constant as the catalogue has it: read once, before anything is put in its place."""
    if name == EARLY:
        return catalog.number(catalog.entry("stacks", "all"), EARLY)
    section, entry, key = CONSTANTS[name].places[0]
    return (
        float(overlap.ACCESSES["gpu"].value)
        if section == "overlap"
        else catalog.number(catalog.entry(section, entry), key)
    )


def put(values: Mapping[str, float]) -> None:
    """Put values in place of the catalogue's, and those of all others as they are in it, in this process."""
    was = {name: value_of(name) for name in (*CONSTANTS, EARLY)}  # remembered before the first change
    for name, constant in CONSTANTS.items():
        _put(constant.places, values.get(name, was[name]))
    _put((("stacks", "all", EARLY),), values.get(EARLY, was[EARLY]))


def _put(places: Sequence[tuple[str, str, str]], value: float) -> None:
    for section, entry, key in places:
        training_steps.forget({(section, "gpu" if section == "overlap" else entry, key): value})


def main() -> None:
    """Price, fit, or price a source at the constants of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sensitivities", action="store_true")
    parser.add_argument("--part", default="0/1", help="K/N: the K-th of N parts of the rows, for several processes")
    parser.add_argument("--again", choices=list(CONSTANTS), metavar="NAME")
    parser.add_argument("--price", metavar="SOURCE")
    options = parser.parse_args()
    if options.again:
        again(options.again)
    elif options.sensitivities:
        sensitivities(options.part)
    elif options.price:
        price(options.price)
    else:
        FITS.write_text("", encoding="utf-8")
        for line in fits([json.loads(each) for each in SENSITIVITIES.read_text(encoding="utf-8").splitlines()]):
            record.write(line, FITS)


def sensitivities(part: str) -> None:
    """Price each row as it is, and with each constant that concerns it changed, but rows that are there already."""
    there = SENSITIVITIES.read_text(encoding="utf-8").splitlines() if SENSITIVITIES.exists() else []
    known = {json.loads(line)["line"] for line in there}
    with training_steps.DATA.open(encoding="utf-8") as file:
        rows = list(enumerate(csv.DictReader(file), start=2))
    number, parts = (int(each) for each in part.split("/"))
    for line, values in rows[len(rows) * number // parts : len(rows) * (number + 1) // parts]:
        if line in known:
            continue
        try:
            read = read_training_row(values)
        except CostModelError:
            continue
        found = _priced(read, [name for name, constant in CONSTANTS.items() if constant.concerns(read)])
        record.write(_line(line, read, found), SENSITIVITIES)


def again(name: str) -> None:
    """Renew the lines of the rows that a constant concerns: as they are, and with it changed.

    What another constant changes of a row is taken to be the same share of it as before.
    """
    with training_steps.DATA.open(encoding="utf-8") as file:
        values = dict(enumerate(csv.DictReader(file), start=2))
    was = [json.loads(each) for each in SENSITIVITIES.read_text(encoding="utf-8").splitlines()]
    lines = []
    for old in was:
        read = read_training_row(values[old["line"]])
        if not CONSTANTS[name].concerns(read):
            lines.append(old)
            continue
        found = _priced(read, [name])
        ratio = found["as it is"] / old["predicted_s"]["as it is"]
        kept = {each: seconds * ratio for each, seconds in old["predicted_s"].items() if each in CONSTANTS}
        lines.append(_line(old["line"], read, kept | found))
    SENSITIVITIES.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")


def _priced(read: TrainingRow, names: Sequence[str]) -> dict[str, float]:
    """Return the predictions of a row, as it is and with each of the constants changed."""
    found = {}
    for name in (None, *names):
        put({} if name is None else {name: CONSTANTS[name].tried})
        found["as it is" if name is None else name] = estimates_of(read).step_time_s
    put({})
    return found


def _line(line: int, read: TrainingRow, found: Mapping[str, float]) -> dict[str, Any]:
    return {
        "line": line, "source": read.source, "early": _earliness(read), "measured_s": read.measured_step_s,
        "predicted_s": found, "constants": {name: value_of(name) for name in found if name in CONSTANTS},
        "early constant": value_of(EARLY), **record.stamp(),
    }  # fmt: skip


def _earliness(read: TrainingRow) -> float:
    """Return how much of a device's first year a row is: 1 then, 0 from two years on."""
    released = int(catalog.number(catalog.entry("devices", read.device), "released", 0))
    return max(0.0, 1.0 - (read.year - released) / 2.0) if released else 0.0


@dataclass(frozen=True)
class Table:
    """Rows and what they say of each constant."""

    measured: Floats
    predicted: Floats
    slopes: Floats
    """[rows, constants]: change of ln(predicted) with ln(constant)."""

    at: Floats
    """Logarithms of the constants at which the rows were priced."""

    earliness: Floats
    early: float

    def errors(self, logs: Floats, early: float) -> Floats:
        """Return ln(predicted / measured) of each row at other constants."""
        rate = np.log((1.0 - early * self.earliness) / (1.0 - self.early * self.earliness))
        moved = self.slopes @ (logs - self.at) + self.slopes[:, 0] * rate
        return np.asarray(np.log(self.predicted / self.measured) + moved)


def table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows as the fit sees them."""
    names = list(CONSTANTS)
    at = {name: value for line in lines for name, value in line["constants"].items()}
    slopes = np.zeros((len(lines), len(names)))
    for row, line in enumerate(lines):
        base = line["predicted_s"]["as it is"]
        for column, name in enumerate(names):
            if name in line["constants"]:
                change = math.log(CONSTANTS[name].tried / at[name])
                slopes[row, column] = math.log(line["predicted_s"][name] / base) / change
    return Table(
        measured=np.array([line["measured_s"] for line in lines]),
        predicted=np.array([line["predicted_s"]["as it is"] for line in lines]),
        slopes=slopes,
        at=np.log([at.get(name, CONSTANTS[name].known) for name in names]),
        earliness=np.array([line["early"] for line in lines]),
        early=float(lines[0]["early constant"]),
    )


def fitted(rows: Table) -> tuple[Floats, float]:
    """Return the logarithms of the constants, and `early`, that the rows ask for."""
    known = np.log([each.known for each in CONSTANTS.values()])
    spread = np.array([each.spread for each in CONSTANTS.values()])
    most = np.log([each.most for each in CONSTANTS.values()])
    logs, early = known.copy(), EARLY_KNOWN
    for _ in range(60):
        errors = rows.errors(logs, early) / ROW_SPREAD
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-9))
        of_early = -rows.slopes[:, 0] * rows.earliness / (1.0 - early * rows.earliness)
        jacobian = np.column_stack((rows.slopes, of_early)) / ROW_SPREAD
        prior = np.diag([*(1.0 / spread**2), EARLY_SPREAD**-2])
        away = np.array([*((logs - known) / spread**2), (early - EARLY_KNOWN) / EARLY_SPREAD**2])
        normal = (jacobian * weights[:, None]).T @ jacobian + prior
        step = np.linalg.solve(normal, (jacobian * weights[:, None]).T @ errors + away)
        logs = np.minimum(logs - 0.7 * step[:-1], most)
        early = float(np.clip(early - 0.7 * step[-1], 0.0, 0.5))
    return logs, early


def fits(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the constants of all sources and of all but each, and how far the rows left out are then."""
    for left_out in (None, *dict.fromkeys(line["source"] for line in lines)):
        rest = [line for line in lines if line["source"] != left_out]
        mine = [line for line in lines if left_out in (None, line["source"])]
        logs, early = fitted(table(rest))
        errors = np.expm1(_with_all_columns(mine, lines).errors(logs, early))
        yield {
            "left_out": left_out,
            "rows": len(mine),
            "constants": {**dict(zip(CONSTANTS, np.exp(logs).tolist(), strict=True)), EARLY: early},
            "linear": {
                "median": float(np.median(np.abs(errors))),
                "mean": float(np.mean(np.abs(errors))),
                "bias": float(np.mean(errors)),
            },
        }


def _with_all_columns(mine: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of some rows, with the constants as all rows were priced."""
    return replace(table(mine), at=table(lines).at)


def price(source: str) -> None:
    """Price the rows of a source at the constants fitted without it, in place of what the results have of it."""
    found = [json.loads(line) for line in FITS.read_text(encoding="utf-8").splitlines()]
    put(next(line["constants"] for line in found if line["left_out"] == source))
    with training_steps.DATA.open(encoding="utf-8") as file:
        rows = [(line, row) for line, row in enumerate(csv.DictReader(file), start=2) if row["source"] == source]
    lines = [
        training_steps.described(each, source) | {"data": training_steps.DATA.name}
        for each in price_steps(rows, workers=1)
    ]
    training_steps.replace_lines(lambda line: line["left_out"] == source, lines)


if __name__ == "__main__":
    main()
