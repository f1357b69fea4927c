"""Which architectures of transformers can be planned, how fast, and which operators have no sharding rule.

    python -m benchmarks.coverage --names llama bert

Small configurations of `autopar.models.hf_tiny`, on meta, without a GPU, for one node of eight devices and two of four,
a CPU cluster and an H100 one: meshes (8,) and (2,4). A process an architecture, so that one that crashes takes no other
along; imports and building the model are not timed, capture is, once a plan. One line of JSON a plan, on stdout and in
benchmarks/results/coverage.jsonl; with --table FILE also a Markdown table. Ends with 1 if an architecture failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, markdown, write

CLUSTERS: dict[str, tuple[str, dict[str, int]]] = {
    "cpu (8,)": ("cpu:8", {}),
    "cpu (2,4)": ("cpu:4x2", {"dp_shard": 2}),
    "h100 (8,)": ("h100-sxm-80gb:8", {}),
    "h100 (2,4)": ("h100-sxm-80gb:4x2", {"dp_shard": 2}),
}
"""Cluster, and what makes the mesh have two axes: what lies inside the outer one is free."""


def cover(name: str) -> list[dict[str, Any]]:
    """Return a row for each cluster, planned in this process."""
    import autopar
    from autopar.models.hf_tiny import tiny

    rows = []
    for title, (cluster, fix) in CLUSTERS.items():
        row: dict[str, Any] = {"benchmark": "coverage", "model": name, "cluster": title}
        model, inputs = tiny(name, meta=True)
        start = time.perf_counter()
        try:
            plan = autopar.plan(model, cluster, example_inputs=inputs, fix=fix)
        except Exception as error:  # noqa: BLE001  a failure is a result here
            rows.append({**row, "planned": False, "error": f"{type(error).__name__}: {error}"[:500]})
            continue
        rows.append(
            {
                **row,
                "planned": True,
                "seconds": round(time.perf_counter() - start, 3),
                "without_rule": sorted({_operator(each.text) for each in plan.warnings if each.code == "no-rule"}),
                "mesh": str(plan.decisions.mesh),
                "operators": len(plan.decisions.operators),
                "gap": plan.solver.gap,
                "predicted_s": plan.estimates.step_time_s,
            }
        )
    return rows


def _operator(warning: str) -> str:
    return warning.partition(" ")[0]


def in_own_process(name: str, timeout_s: float) -> list[dict[str, Any]]:
    """Return the rows of an architecture, planned in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.coverage", "--here", name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
        error = done.stderr[-500:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = f"not done within {timeout_s:.0f} s"
    if error:
        return [
            {"benchmark": "coverage", "model": name, "cluster": title, "planned": False, "error": error}
            for title in CLUSTERS
        ]
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each architecture: seconds by cluster, operators without rule."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(row["model"], {"model": row["model"], "without rule": []})
        line[f"{row['cluster']}, s"] = row["seconds"] if row["planned"] else f"failed: {row['error'][:80]}"
        line["without rule"] = sorted({*line["without rule"], *row.get("without_rule", ())})
    columns = ["model", *(f"{title}, s" for title in CLUSTERS), "without rule"]
    return markdown(list(lines.values()), columns)


def main() -> int:
    """Plan every architecture asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", help="architectures of autopar.models.hf_tiny; all by default")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds an architecture may take")
    parser.add_argument("--here", metavar="NAME", help="plan one architecture in this process")
    parser.add_argument("--table", type=Path, metavar="FILE", help="where a Markdown table goes")
    parser.add_argument("--output", type=Path, default=RESULTS / "coverage.jsonl")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(cover(args.here)))
        return 0
    from autopar.models.hf_tiny import tiny_names

    rows = []
    for name in args.names or tiny_names():
        for row in in_own_process(name, args.timeout):
            write(row, args.output)
            rows.append(row)
    if args.table:
        args.table.write_text(table(rows), encoding="utf-8")
    return 0 if all(row["planned"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
