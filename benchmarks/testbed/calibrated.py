"""Whether predictions are right once the testbed is calibrated: plans of each kind, predicted and run.

    python benchmarks/testbed/netrun.py --rate 1gbit -- python -m autopar calibrate \
        -c benchmarks/testbed/cluster_1gbit.yaml -o benchmarks/testbed/calibration_1gbit.json
    python -m benchmarks.testbed.calibrated --scenarios gpt_balanced

Each scenario is planned as data parallelism, with parameters sharded, as tensor parallelism, as a pipeline, with its
experts split (if any) and freely, on the calibrated cluster, and each plan is run by `autopar.compile` on two hosts
at 1 Gbit/s, interleaved with the others. A row has the seconds predicted with the catalogue's figures and with
the calibration's, and those measured. Programs of `families.py` are other ones than those that the cost model was made
with; --hand runs DDP and FSDP2 beside them. --summary tells errors and whether the plan predicted to be fastest was,
from the last row of each.

With --measured FILE nothing is run: seconds are those of the last lines of benchmarks/testbed/compare.py in that file,
of its hand-written DDP and TP and of its plans (FSDP2 is another program than a plan's); `measured` says of which.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import autopar
from benchmarks.record import RESULTS, spread, write
from benchmarks.testbed.compare import HERE, measure
from benchmarks.testbed.scenarios import SCENARIOS
from benchmarks.testbed.step import PROGRAMS

KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "dp": ("ddp", {"dp_replicate": 2}),
    "zero": ("fsdp2", {"dp_shard": 2, "zero": 3}),
    "tp": ("tp", {"tp": 2}),
    "pp": ("pipeline", {"pp": 2}),
    "ep": ("autopar", {"ep": 2}),
    "free": ("autopar", {}),
}
"""Kinds of plan: the strategy of `compare.py` that is most like it, and what is fixed."""

PLAIN, CALIBRATED = HERE / "cluster_1gbit.yaml", HERE / "cluster_1gbit_calibrated.yaml"
SAME = 0.05
"""Plans measured closer than this are equally fast."""


def run(scenario: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what was predicted and measured of each kind of plan of one program, and of those written by hand.

    A kind that the planner refuses is told and left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = {}
        for kind in args.kinds:
            try:
                rows[kind] = predicted(scenario, kind, Path(folder) / f"{kind}.json")
            except autopar.AutoparError as error:
                print(f"calibrated: {scenario}, {kind}: {error}", file=sys.stderr)
        rows |= {hand: {"kind": hand} for hand in args.hand}
        found: dict[str, list[float]] = {kind: [] for kind in rows}
        for _ in range(args.rounds if args.measured is None else 0):
            for kind, steps in found.items():
                strategy, plan = "autopar" if kind in KINDS else kind, Path(folder) / f"{kind}.json"
                steps += measure(scenario, strategy, "1gbit", CALIBRATED, plan, args)["step_s"]
    done = []
    for kind, row in rows.items():
        if args.measured is None:
            timed = {**spread(found[kind]), "rounds": args.rounds, "measured": "autopar" if kind in KINDS else kind}
        else:
            timed = earlier(args.measured, scenario, KINDS[kind][0])
        row |= {"benchmark": "calibrated", "scenario": scenario, **timed}
        if "predicted_s" in row:
            row["ratio"] = row["predicted_s"] / row["measured_s"]
        done.append(row)
    return done


def predicted(scenario: str, kind: str, path: Path) -> dict[str, Any]:
    """Return what is predicted of a kind of plan, which is saved at `path`."""
    model, batch = PROGRAMS[scenario].build()
    fix = KINDS[kind][1]
    plan = autopar.plan(model, CALIBRATED, example_inputs=batch, optimizer="adamw", fix=fix)
    plan.save(path)
    before = autopar.plan(model, PLAIN, example_inputs=batch, optimizer="adamw", fix=fix)
    estimates = plan.estimates
    return {
        "kind": kind,
        "degrees": {axis: size for axis, size in plan.decisions.degrees.items() if size > 1},
        "predicted_s": estimates.step_time_s,
        "uncalibrated_s": before.estimates.step_time_s,
        "compute_s": estimates.breakdown.compute_s,
        "exposed_communication_s": estimates.breakdown.exposed_communication_s,
        "optimizer_s": estimates.breakdown.optimizer_s,
    }


def earlier(path: Path, scenario: str, strategy: str) -> dict[str, Any]:
    """Return what the last line of a strategy in a file of `compare.py` says was measured."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    wanted = {"scenario": scenario, "strategy": strategy, "rate": "1gbit"}
    row = [row for row in rows if wanted.items() <= row.items()][-1]
    kept = ("measured_s", "min_s", "max_s", "repeats")
    return {
        **{key: row[key] for key in kept},
        "measured": f"{strategy} of {row['date']}",
        "measured_degrees": row["degrees"],
    }


def summary(path: Path) -> str:
    """Return errors of all plans, and of each scenario which plan was predicted and which measured to be best."""
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("measured_degrees", row.get("degrees")) != row.get("degrees"):
            continue  # another plan than the one that was measured
        last[row["scenario"], row["kind"]] = row
    lines = []
    plans = [row for row in last.values() if row["kind"] in KINDS]
    for key, title in (("uncalibrated_s", "catalogue"), ("predicted_s", "calibrated")):
        errors = [abs(row[key] / row["measured_s"] - 1) for row in plans]
        lines.append(
            f"{title}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%} ({len(errors)})"
        )
    for scenario in dict.fromkeys(key[0] for key in last):
        rows = {kind: row for (name, kind), row in last.items() if name == scenario}
        ours = {kind: row for kind, row in rows.items() if kind in KINDS}
        first = min(ours, key=lambda kind: ours[kind]["predicted_s"])
        best = min(row["measured_s"] for row in rows.values())
        behind = rows[first]["measured_s"] / best - 1
        said = "is" if behind <= SAME else f"is {behind:.0%} behind"
        seconds = ", ".join(
            f"{k} {r['predicted_s']:.3f} / {r['measured_s']:.3f}" if k in KINDS else f"{k} {r['measured_s']:.3f}"
            for k, r in rows.items()
        )
        lines.append(f"{scenario}: predicted best {first} {said} the measured best ({seconds} s)")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run every case asked for and print the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", nargs="+", choices=PROGRAMS, default=list(SCENARIOS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--hand", nargs="*", choices=("ddp", "fsdp2"), default=[], help="what is run beside the plans")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each plan, interleaved")
    parser.add_argument("--steps", type=int, default=5, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps a run")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a run may take")
    parser.add_argument("--hosts", type=int, default=2, help="as the cluster files describe")
    parser.add_argument("--tag", default="cal", help="prefix of the network namespaces")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="lines of compare.py, instead of running plans")
    parser.add_argument("--summary", action="store_true", help="of the rows there are; nothing is run")
    parser.add_argument("--output", type=Path, default=RESULTS / "calibrated.jsonl")
    args = parser.parse_args()
    args.ranks_per_host = 1
    if args.measured is not None:
        args.kinds, args.hand = [kind for kind in args.kinds if kind != "zero"], []
    if not args.summary:
        for scenario in args.scenarios:
            for row in run(scenario, args):
                write(row, args.output)
    sys.stdout.write(summary(args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
