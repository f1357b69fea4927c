"""The testbed's last measurement of each scenario as a Markdown table: hand-written, planned, and predicted.

    python -m benchmarks.testbed.table [benchmarks/results/testbed.jsonl] [--readme]

Seconds a step, medians; the ratio is the median over rounds of the plan's time over the best hand-written strategy's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, markdown

README = ROOT / "README.md"
BEGIN, END = "<!-- testbed -->", "<!-- end -->"
HANDS = {"ddp": "DDP", "fsdp2": "FSDP2", "tp": "hand TP", "pipeline": "hand PP"}


def rows_of(lines: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return a row for each scenario and rate, from the last line of each strategy."""
    last: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for line in lines:
        last.setdefault((line["scenario"], line["rate"], line.get("hosts", 2)), {})[line["strategy"]] = line
    found = []
    for (scenario, rate, hosts), by in last.items():
        planned = by.get("autopar")
        if planned is None:
            continue
        best = planned["best_hand"]
        row = {"scenario": scenario.replace("_", " ")}
        row["link"] = {"1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}.get(rate, rate)
        row["hosts"] = str(hosts)
        for name, title in HANDS.items():
            seconds = f"{by[name]['measured_s']:.3f}" if name in by else ""
            row[title] = f"**{seconds}**" if name == best else seconds
        degrees = " x ".join(f"{axis}={size}" for axis, size in planned["degrees"].items())
        row["plan"] = degrees
        row["measured"] = f"{planned['measured_s']:.3f}"
        row["predicted"] = f"{planned['predicted_s']:.3f}"
        row["to best hand"] = f"{planned['ratio_to_best_hand']:.2f}"
        found.append(row)
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "testbed.jsonl")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md, too")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.file.read_text().splitlines()]
    columns = ("scenario", "link", "hosts", *HANDS.values(), "plan", "measured", "predicted", "to best hand")
    table = markdown(rows_of(lines), columns)
    print(table)
    if args.readme:
        text = README.read_text()
        head, _, rest = text.partition(BEGIN)
        _, _, tail = rest.partition(END)
        README.write_text(f"{head}{BEGIN}\n{table}{END}{tail}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
