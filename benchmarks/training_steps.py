"""How far predicted training steps are from published ones.

    python -m benchmarks.training_steps --write           # results/training_steps.jsonl, tables of docs/
    python -m benchmarks.training_steps --held-out --write   # likewise the rows that no constant was fitted to
    python -m benchmarks.training_steps --tables          # the tables again, from the results as they are

Sources left out of the fit, priced at the constants of the others: benchmarks/refit.py.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from autopar.api.validating import price_steps
from benchmarks import record
from cost_models import catalog, overlap
from cost_models.published import Priced
from cost_models.training_rows import TrainingRow, read_training_row
from cost_models.validation import Skipped, rank_correlation

DATA = record.ROOT / "benchmarks" / "data" / "training_steps.csv"
HELD_OUT = DATA.with_name("training_steps_held_out.csv")
"""Rows that nothing was fitted to, nor chosen by."""

RESULTS = record.RESULTS / "training_steps.jsonl"


def main() -> None:
    """Price, print as JSON lines and, with `--write`, renew the results and the tables of the documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    if not options.tables:
        price(HELD_OUT if options.held_out else DATA, RESULTS if options.write else None)
    if options.write or options.tables:
        found = tables([json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()])
        record.renew({name: record.markdown(rows, list(rows[0])) for name, rows in found.items() if rows})


def price(data: Path, results: Path | None) -> None:
    """Price all rows of a file, print them, and keep their lines in place of what there was of it."""
    with data.open(encoding="utf-8") as file:
        rows = [(line, row) for line, row in enumerate(csv.DictReader(file), start=2)]
    found = sorted(price_steps(rows), key=lambda each: each.line)
    lines = [described(each, None) | {"data": data.name} for each in found]
    if results is None:
        for line in lines:
            record.write(line, None)
    else:
        replace_lines(lambda line: line["data"] == data.name and line["left_out"] is None, lines)


def replace_lines(stale: Callable[[Mapping[str, Any]], bool], lines: Sequence[Mapping[str, Any]]) -> None:
    """Take the stale lines out of the results and add others, with their stamps."""
    kept = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    RESULTS.write_text("".join(f"{line}\n" for line in kept if not stale(json.loads(line))), encoding="utf-8")
    for each in lines:
        record.write(each, RESULTS)


def forget(constants: Mapping[tuple[str, str, str], float]) -> None:
    """Put constants in place of those of the catalogue, in this process."""
    for (section, name, key), value in constants.items():
        if section == "overlap":
            overlap.ACCESSES[name] = replace(overlap.ACCESSES[name], value=value)
        else:
            entry: Any = catalog.entry(section, name)
            entry[key] = replace(entry[key], value=value)


def described(each: Priced | Skipped, left_out: str | None) -> dict[str, Any]:
    """Return a line of the results."""
    if isinstance(each, Skipped):
        return {"line": each.line, "skipped": each.reason, "left_out": left_out}
    return {
        "line": each.line,
        "row": each.label,
        "source": each.source,
        "group": each.group,
        "measured_s": each.measured_s,
        "predicted_s": each.predicted_s,
        "measured_bytes": each.measured_bytes,
        "predicted_bytes": each.predicted_bytes,
        "device_bytes": each.device_bytes,
        "left_out": left_out,
    }


def tables(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of the document."""
    priced = [line for line in lines if "skipped" not in line]
    rows = [line for line in priced if line["left_out"] is None and line["data"] == DATA.name]
    others = [line for line in priced if line["left_out"] is not None]
    unseen = [line for line in priced if line["data"] == HELD_OUT.name]
    return {
        "training steps": list(by_source(rows)),
        "training steps by property": list(by_property(rows)),
        "worst training steps": list(worst(rows)),
        "training steps left out": list(by_source(others)),
        "training steps held out": list(by_source(unseen)),
        "all training steps held out": list(worst(unseen, len(unseen))),
    }


def by_source(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the errors of each source, then of all."""
    for name in [*dict.fromkeys(line["source"] for line in lines), "all"]:
        mine = [line for line in lines if name in ("all", line["source"])]
        if not mine:
            continue
        ranked = rank_correlation([_priced(line) for line in mine])
        memory = [abs(line["predicted_bytes"] / line["measured_bytes"] - 1) for line in mine if line["measured_bytes"]]
        yield {
            "source": name,
            **_errors(mine),
            "rank correlation": "" if ranked is None else f"{ranked:.3f}",
            "memory, mean": f"{mean(memory):.1%}" if memory else "",
            "too large": sum(_priced(line).is_too_large for line in mine) if "device_bytes" in mine[0] else "",
        }


def by_property(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the errors of rows that have something in common."""
    with DATA.open(encoding="utf-8") as file:
        read = {line: read_training_row(row) for line, row in enumerate(csv.DictReader(file), start=2)}
    kinds: Mapping[str, Callable[[TrainingRow], bool]] = {
        "A100, 40 GB": lambda row: row.device == "a100-sxm-40gb",
        "A100, 80 GB": lambda row: row.device == "a100-sxm-80gb",
        "H100": lambda row: row.device.startswith("h100"),
        "parameters sharded": lambda row: row.zero == 3,
        "tensor parallel in a node": lambda row: 1 < row.tp <= row.gpus_per_node,
        "tensor parallel over two nodes": lambda row: row.tp > row.gpus_per_node,
        "pipelines": lambda row: row.pp > 1,
        "interleaved": lambda row: row.interleave > 1,
        "nothing recomputed": lambda row: row.recompute == "none",
        "layers recomputed": lambda row: row.recompute == "full",
        "16384 tokens a sequence and more": lambda row: row.seq_len >= 16384,
        "hidden 1024 and 2048, fewer than 64 GPUs": lambda row: row.source == "vtrain_a100" and row.gpus < 64,
    }
    for name, belongs in kinds.items():
        mine = [line for line in lines if belongs(read[line["line"]])]
        if mine:
            yield {"rows with": name, **_errors(mine)}


def worst(lines: Sequence[Mapping[str, Any]], count: int = 12) -> Iterator[dict[str, Any]]:
    """Yield the rows of largest error."""
    for line in sorted(lines, key=lambda line: -abs(_error(line)))[:count]:
        yield {
            "line": line["line"],
            "row": line["row"],
            "measured s": line["measured_s"],
            "predicted s": line["predicted_s"],
            "error": f"{_error(line):+.0%}",
        }


def _errors(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    errors = [_error(line) for line in lines]
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(errors),
        "median": f"{median(sizes):.1%}",
        "mean": f"{mean(sizes):.1%}",
        "bias": f"{mean(errors):+.1%}",
    }


def _error(line: Mapping[str, Any]) -> float:
    return float(line["predicted_s"] / line["measured_s"] - 1)


def _priced(line: Mapping[str, Any]) -> Priced:
    names = ("measured_bytes", "predicted_bytes", "device_bytes")
    sizes: dict[str, Any] = {name: line.get(name) for name in names}
    return Priced(
        line["line"], line["row"], line["source"], line["group"], "", line["measured_s"], line["predicted_s"], **sizes
    )


if __name__ == "__main__":
    main()
