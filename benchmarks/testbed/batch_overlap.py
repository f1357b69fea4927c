"""Whether two micro-batches at once hide collectives that one waits for, on hosts with throttled links.

    python -m benchmarks.testbed.batch_overlap --scenarios gpt_balanced deep_square

Tensor parallelism over two hosts, which every operator waits for: the whole batch at once, in two micro-batches one
after another, and these two at once (`--fix batch_overlap=2`), interleaved, a process a run. One line of JSON a way:
seconds of its steps, the median over rounds of its time over that of the whole batch, and what the cost model predicts
of both. Lines go to stdout and to benchmarks/results/batch_overlap.jsonl; --table prints the last of each as Markdown.
Needs root and iproute2; ends with 77 where they are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, markdown, spread, write
from benchmarks.testbed.compare import SKIP, calibrated_cluster_of, measure
from benchmarks.testbed.scenarios import SCENARIOS

WAYS = ("whole", "in turn", "at once")
COLUMNS = ("scenario", "rate", "way", "predicted", "measured", "predicted to whole", "measured to whole")


def fixed(way: str, scenario: str) -> dict[str, int]:
    """Return what to fix for a way to run a scenario."""
    if way == "whole":
        return {"tp": 2, "microbatch": SCENARIOS[scenario].batch}
    at_once = 2 if way == "at once" else 1
    return {"tp": 2, "microbatch": SCENARIOS[scenario].batch // 2, "batch_overlap": at_once}


def run(scenario: str, rate: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each way."""
    import autopar

    cluster = calibrated_cluster_of(rate, args.hosts, args.ranks_per_host)
    predicted_s: dict[str, float] = {}
    seconds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        paths = {way: Path(folder) / f"{way.replace(' ', '_')}.json" for way in WAYS}
        model, batch = SCENARIOS[scenario].build()
        for way in WAYS:
            plan = autopar.plan(model, cluster, example_inputs=batch, optimizer="adamw", fix=fixed(way, scenario))
            predicted_s[way] = plan.estimates.step_time_s
            plan.save(paths[way])
        for _ in range(args.rounds):
            for way, path in paths.items():
                seconds[way].append(measure(scenario, "autopar", rate, cluster, path, args)["step_s"])
    medians = {way: [statistics.median(each) for each in rounds] for way, rounds in seconds.items()}
    return [
        {
            "benchmark": "batch_overlap",
            "scenario": scenario,
            "rate": rate,
            "way": way,
            **spread([second for each in seconds[way] for second in each]),
            "rounds": args.rounds,
            "predicted_s": predicted_s[way],
            "predicted_to_whole": round(predicted_s[way] / predicted_s["whole"], 4),
            "measured_to_whole": round(
                statistics.median(mine / its for mine, its in zip(medians[way], medians["whole"], strict=True)), 4
            ),
        }
        for way in WAYS
    ]


def rows_of(lines: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the last line of each case as a row of a table."""
    last = {(line["scenario"], line["rate"], line["way"]): line for line in lines}
    return [
        {
            "scenario": scenario.replace("_", " "),
            "rate": rate,
            "way": way,
            "predicted": f"{line['predicted_s']:.3f}",
            "measured": f"{line['measured_s']:.3f}",
            "predicted to whole": f"{line['predicted_to_whole']:.2f}",
            "measured to whole": f"{line['measured_to_whole']:.2f}",
        }
        for (scenario, rate, way), line in last.items()
    ]


def main() -> int:
    """Measure the scenarios asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=["gpt_balanced", "deep_square"])
    parser.add_argument("--rates", nargs="+", default=["1gbit"])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way")
    parser.add_argument("--steps", type=int, default=5, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps a run")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a run may take")
    parser.add_argument("--tag", default="bo", help="prefix of the network namespaces")
    parser.add_argument("--table", action="store_true", help="print the last line of each case, and nothing else")
    parser.add_argument("--output", type=Path, default=RESULTS / "batch_overlap.jsonl")
    args = parser.parse_args()
    args.hosts, args.ranks_per_host = 2, 1
    if args.table:
        lines = map(json.loads, args.output.read_text(encoding="utf-8").splitlines())
        print(markdown(rows_of(lines), COLUMNS))
        return 0
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("batch_overlap: needs root, ip and tc (apt-get install -y iproute2)", file=sys.stderr)
        return SKIP
    for rate in args.rates:
        for scenario in args.scenarios:
            for row in run(scenario, rate, args):
                write(row, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
