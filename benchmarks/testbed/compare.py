"""Whether the planned program is as fast as the best hand-written strategy, on hosts with throttled links.

    python -m benchmarks.testbed.compare --rates 1gbit 200mbit --scenarios gpt_balanced deep_square

Strategies run interleaved (ddp fsdp2 tp pipeline autopar, ddp fsdp2 ...), a process a run, so that a machine that
grows slower does so for all of them. One line of JSON a strategy: median, least and largest seconds of its steps, the
median over rounds of its time over that of the best hand-written strategy in the same round, and what the cost model
predicts of the same choice: the search's own plan for `autopar`, the degrees fixed for the others, none chosen by hand.
Lines go to stdout and to benchmarks/results/testbed.jsonl. Needs root and iproute2; ends with 77 where they are
missing, and with 1 if a planned program was slower than `--limit` times the best hand-written one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.record import RESULTS, ROOT, spread, write
from benchmarks.testbed.pipeline import MICROBATCHES
from benchmarks.testbed.scenarios import SCENARIOS

HERE = Path(__file__).resolve().parent
SKIP = 77
STRATEGIES = ("ddp", "fsdp2", "tp", "pipeline", "autopar", "flat")
PLANNED = ("autopar", "flat")
"""Strategies that run a plan of ours; `flat`: without collectives in two levels."""

_SAME_LOSS = 1e-3
"""Relative difference from which two strategies do not compute the same training."""


@dataclass
class Run:
    """What was predicted and measured of one strategy of one scenario."""

    strategy: str
    predicted_s: float | None = None
    degrees: dict[str, int] | None = None
    two_level: int = 0
    """Collectives of a step that run in two levels."""

    note: str = ""
    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of the steps of each round."""

    losses: list[float] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        """Return the median seconds of each round."""
        return [statistics.median(each) for each in self.rounds]


def fixed(strategy: str, ranks: int, batch: int, wished: Mapping[str, int]) -> dict[str, int]:
    """Return what to fix, so that the planner prices the strategy; `wished` is for our own plans."""
    if strategy in PLANNED:
        return dict(wished)
    if strategy == "pipeline":
        return {"pp": ranks, "interleave": 1, "microbatch": batch // min(MICROBATCHES * ranks, batch)}
    return {
        "ddp": {"dp_replicate": ranks},
        "fsdp2": {"dp_shard": ranks, "zero": 3},
        "tp": {"tp": ranks},
    }[strategy]


def cluster_of(rate: str, hosts: int, ranks_per_host: int, folder: Path) -> Path:
    """Return the cluster file of a rate with so many hosts: the one measured with as many ranks, if there is one.

    Ranks of one host talk over its loopback interface.
    """
    measured = HERE / f"cluster_{rate}_{hosts}x{ranks_per_host}.yaml"
    if measured.is_file():
        return measured
    document = yaml.safe_load((HERE / f"cluster_{rate}.yaml").read_text())
    document["groups"] = [{"node": "host", "count": hosts}]
    if ranks_per_host > 1:
        document["nodes"]["host"] |= {"count": ranks_per_host, "links": {"preset": "loopback-gloo"}}
    made = folder / "cluster.yaml"
    made.write_text(yaml.safe_dump(document))
    return made


def calibrated_cluster_of(rate: str, hosts: int, ranks_per_host: int) -> Path:
    """Return the cluster file of a rate that names what `autopar calibrate` measured there.

    Raises:
        FileNotFoundError: nothing was measured with so many hosts and ranks.
    """
    found = HERE / f"cluster_{rate}{'' if hosts == 2 else f'_{hosts}'}_calibrated.yaml"
    if ranks_per_host > 1 or not found.is_file():
        raise FileNotFoundError(
            f"--calibrated: {hosts} hosts with {ranks_per_host} ranks each have no {found}; write one that names what "
            "`autopar calibrate` measures under netrun.py there, or leave --calibrated out"
        )
    return found


def compare(scenario: str, rate: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], float | None]:
    """Return a row for each strategy, and the ratio of the planned program to the best hand-written one."""
    runs = {name: Run(name) for name in args.strategies}
    with tempfile.TemporaryDirectory() as folder:
        shape = args.hosts, args.ranks_per_host
        cluster = calibrated_cluster_of(rate, *shape) if args.calibrated else cluster_of(rate, *shape, Path(folder))
        if not args.no_predictions:
            for run in runs.values():
                predict(run, scenario, cluster, args, Path(folder))
        for _ in range(args.rounds):
            for name, run in runs.items():
                found = measure(scenario, name, rate, cluster, Path(folder) / f"{name}.json", args)
                run.rounds.append(found["step_s"])
                run.losses = found["losses"]
    check_same_training(scenario, list(runs.values()))
    hand = [run for name, run in runs.items() if name not in PLANNED]
    best = min(hand, key=lambda run: statistics.median(run.medians), default=None)
    rows = [_row(scenario, rate, args, run, best) for run in runs.values()]
    planned = runs.get("autopar")
    return rows, _ratio(planned, best) if planned and best else None


def predict(run: Run, scenario: str, cluster: Path, args: argparse.Namespace, folder: Path) -> None:
    """Plan the strategy, keep what is predicted of it, and the plan as STRATEGY.json in `folder`.

    A hand-written strategy that the planner cannot price is measured nevertheless, and its row says why.
    """
    import autopar

    model, batch = SCENARIOS[scenario].build()
    fix = fixed(run.strategy, args.hosts * args.ranks_per_host, SCENARIOS[scenario].batch, args.fix)
    # What others wrote knows one level only.
    two_level = run.strategy == "autopar"
    try:
        plan = autopar.plan(model, cluster, example_inputs=batch, optimizer="adamw", fix=fix, two_level=two_level)
    except autopar.AutoparError as error:
        if run.strategy in PLANNED:
            raise
        run.note = str(error)
        return
    run.predicted_s = plan.estimates.step_time_s
    run.degrees = {axis: size for axis, size in plan.decisions.degrees.items() if size > 1}
    run.two_level = sum(each.count for each in plan.decisions.collectives if each.inner > 1)
    plan.save(folder / f"{run.strategy}.json")


def measure(
    scenario: str, strategy: str, rate: str, cluster: Path, plan: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Return what one run of `step.py` on the testbed printed.

    Raises:
        RuntimeError: a rank failed, or the run took too long.
    """
    command = [
        *(
            sys.executable,
            str(HERE / "netrun.py"),
            "--hosts",
            str(args.hosts),
            "--ranks-per-host",
            str(args.ranks_per_host),
        ),
        *("--tag", args.tag),
        *("--rate", rate, "--timeout", str(args.timeout), "--", sys.executable, "-m", "benchmarks.testbed.step"),
        *("--scenario", scenario, "--strategy", strategy, "--steps", str(args.steps), "--warmup", str(args.warmup)),
    ]
    if strategy in PLANNED:
        command += ["--cluster", str(cluster), "--plan", str(plan)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{strategy} of {scenario} at {rate} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def check_same_training(scenario: str, runs: Sequence[Run]) -> None:
    """Check that all strategies trained the same model on the same batch.

    Raises:
        RuntimeError: the losses of a strategy differ from those of the first.
    """
    first = runs[0]
    for run in runs[1:]:
        for step, (wanted, got) in enumerate(zip(first.losses, run.losses, strict=True)):
            if abs(wanted - got) > _SAME_LOSS * abs(wanted):
                raise RuntimeError(
                    f"{scenario}: loss of step {step} is {wanted} by {first.strategy}, {got} by {run.strategy}"
                )


def _ratio(run: Run, best: Run) -> float:
    return statistics.median(mine / its for mine, its in zip(run.medians, best.medians, strict=True))


def _row(scenario: str, rate: str, args: argparse.Namespace, run: Run, best: Run | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "benchmark": "testbed",
        "scenario": scenario,
        "rate": rate,
        "hosts": args.hosts,
        "ranks_per_host": args.ranks_per_host,
        "strategy": run.strategy,
        **spread([second for each in run.rounds for second in each]),
        "rounds": len(run.rounds),
        "ratio_to_best_hand": round(_ratio(run, best), 4) if best else None,
        "best_hand": best.strategy if best else None,
        "predicted_s": run.predicted_s,
        "calibrated": args.calibrated,
        "degrees": run.degrees,
        "two_level": run.two_level,
        "last_loss": run.losses[-1],
    }
    return {**row, "note": run.note} if run.note else row


def _degree(text: str) -> tuple[str, int]:
    key, _, value = text.partition("=")
    return key, int(value)


def main() -> int:
    """Compare the strategies in every scenario and rate asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"], help="each has a cluster_RATE.yaml here")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES[:-1]))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1, help="which talk over its loopback interface")
    parser.add_argument("--calibrated", action="store_true", help="plan with what `autopar calibrate` measured there")
    parser.add_argument("--fix", type=_degree, nargs="+", default=[], metavar="KEY=N", help="of our own plans")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each strategy")
    parser.add_argument("--steps", type=int, default=5, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps a run")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a run may take")
    parser.add_argument("--tag", default="ap", help="prefix of the network namespaces")
    parser.add_argument("--limit", type=float, default=1.05, help="allowed ratio to the best hand-written strategy")
    parser.add_argument("--no-predictions", action="store_true", help="measure hand-written strategies only")
    parser.add_argument("--output", type=Path, default=RESULTS / "testbed.jsonl")
    args = parser.parse_args()
    args.fix = dict(args.fix)
    for rate in args.rates:
        if not (HERE / f"cluster_{rate}.yaml").is_file():
            parser.error(f"--rates {rate}: there is no {HERE / f'cluster_{rate}.yaml'}")
    if args.no_predictions and set(PLANNED) & set(args.strategies):
        parser.error(
            "autopar and flat run their predictions; leave them out of --strategies, or leave out --no-predictions"
        )
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("compare: needs root, ip and tc (apt-get install -y iproute2)", file=sys.stderr)
        return SKIP
    status = 0
    for rate in args.rates:
        for scenario in args.scenarios:
            rows, ratio = compare(scenario, rate, args)
            for row in rows:
                write(row, args.output)
            if ratio is not None and ratio > args.limit:
                print(f"compare: {scenario} at {rate}: {ratio:.3f} times the best, limit {args.limit}", file=sys.stderr)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
