"""How much of a pipeline's time its ranks are idle: predicted beside measured, on hosts with throttled links.

    python benchmarks/testbed/netrun.py --rate 200mbit --burst 32kb -- python -m autopar calibrate \
        -c benchmarks/testbed/cluster_200mbit.yaml -o benchmarks/testbed/calibration_200mbit.json
    python -m benchmarks.testbed.bubble --scenarios deep_square gpt_balanced --schedules 1f1b zb_h1

A step's *span* is from the first rank's first action to the last one's last; a rank is idle in it while it computes no
action: it waits for others, or for what is on its way. The *bubble* is the share of the span that ranks are idle, mean
over ranks. Both sides by the same definition: measured are the actions' times of the run itself (`Runner.events`; ranks
of one machine share a clock), predicted those of the simulated schedule (`simulate.planned`). What follows the last
action, the optimizer above all, is in the step and not in the span. `calibrated` says what the prediction knew of the
machine: the file of a calibration, or nothing.

For each kind of action and for transfers there are seconds, too, to see which of them a wrong prediction is owed to. A
transfer's are those between the end of the action that makes and the start of the one that reads, where the latter was
waited for; they hold what the reader's host takes to wake up.

Links let bursts of `--burst` through at once, 32 kB here: a bucket of 256 kB, netrun's own, is full again before the
next micro-batch, so that its 262 kB arrive after 1 ms, over a link that takes 10.5 ms for them (393 kB: 6.5 of 15.7).

Two ranks that share a core compute at half its rate, but only while both compute. With more hosts than cores, actions
are longer the more ranks compute beside them, on both sides: calibration measures how many cores there are, and the
simulator shares them.

Lines go to stdout and to benchmarks/results/bubble.jsonl; --table prints the last line of each case as Markdown.
Needs root and iproute2; ends with 77 where they are missing.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, markdown, spread, write
from benchmarks.testbed.compare import HERE, SKIP, cluster_of
from benchmarks.testbed.scenarios import SCENARIOS

COLUMNS = (
    "scenario", "hosts", "schedule", "calibrated", "bubble", "predicted bubble", "bubble ratio", "step",
    "predicted step", "computing", "predicted computing",
)  # fmt: skip

Row = list[tuple[int, str, int, float, float]]
"""Of one rank's step: stage, kind, micro-batch, start and end of every action, s."""


def as_rank(asked: dict[str, Any]) -> None:
    """Run a plan's steps on this rank; rank 0 prints the actions of all ranks in each step, and the step's seconds."""
    import torch
    import torch.distributed as dist

    import autopar
    from autopar.runtime.module import runner_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, batch = SCENARIOS[asked["scenario"]].build()
    plan = autopar.Plan.load(asked["plan"])
    compiled = autopar.compile(model, asked["cluster"], example_inputs=batch, plan=plan, optimizer="adamw")
    runner = runner_of(compiled)
    if runner is None:
        raise RuntimeError("the model was not compiled")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    steps: list[dict[str, Any]] = []
    for number in range(asked["warmup"] + asked["steps"]):
        dist.barrier()
        start_s = time.perf_counter()
        compiled(*batch).backward()
        ended_s = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        mine = {
            "step_s": time.perf_counter() - start_s,
            "optimizer_s": time.perf_counter() - ended_s,
            "actions": [(*each.action, each.start_s, each.end_s) for each in runner.events],
        }
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        if number >= asked["warmup"]:
            steps.append({key: [each[key] for each in found] for key in mine})
    if dist.get_rank() == 0:
        print(json.dumps(steps), flush=True)
    dist.barrier()


def measure(scenario: str, plan: Path, cluster: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what every rank did in each step on the testbed.

    Raises:
        RuntimeError: a rank failed, or the run took too long.
    """
    asked = {
        "scenario": scenario,
        "plan": str(plan),
        "cluster": str(cluster),
        "steps": args.steps,
        "warmup": args.warmup,
    }
    command = [
        *(sys.executable, str(HERE / "netrun.py"), "--hosts", str(args.hosts), "--rate", args.rate, "--tag", args.tag),
        *(
            "--burst",
            args.burst,
            "--timeout",
            str(args.timeout),
            "--",
            sys.executable,
            "-m",
            "benchmarks.testbed.bubble",
        ),
        *("--as-rank", json.dumps(asked)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{scenario} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: list[dict[str, Any]] = json.loads(lines[-1])
    return found


def figures(rows: Sequence[Row], rank_of: Sequence[int]) -> dict[str, Any]:
    """Return span, bubble and seconds of one step's actions, given those of each rank."""
    events = [each for row in rows for each in row]
    begin, end = min(each[3] for each in events), max(each[4] for each in events)
    computing = [sum(each[4] - each[3] for each in row) for row in rows]
    span = end - begin
    kinds = sorted({(stage, kind) for stage, kind, *_ in events})
    return {
        "span_s": span,
        "computing_s": computing,
        "bubble": 1 - statistics.mean(computing) / span,
        "action_s": {
            f"{kind} {stage}": statistics.median(e[4] - e[3] for e in events if (e[0], e[1]) == (stage, kind))
            for stage, kind in kinds
        },
        "transfer_s": _median_transfer(rows, rank_of),
    }


def _median_transfer(rows: Sequence[Row], rank_of: Sequence[int]) -> float | None:
    """Return the median seconds from the end of what makes a value to the start of what waited for it elsewhere."""
    ends = {(stage, kind, mb): end for row in rows for stage, kind, mb, _, end in row}
    found = []
    for row in rows:
        free = min(each[3] for each in row)
        for stage, kind, mb, start, end in row:
            source = stage - 1 if kind == "F" else stage + 1
            made = ends.get((source, kind, mb)) if kind != "W" else None
            if made is not None and rank_of[source] != rank_of[stage] and made > free:
                found.append(start - made)
            free = end
    return statistics.median(found) if found else None


def row(scenario: str, plan: Any, steps: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return the line of one plan."""
    from autopar.simulate.planned import planned_timeline

    timeline = planned_timeline(plan)
    if timeline is None:
        raise RuntimeError(f"{scenario}: the plan has no stages")
    width = len(plan.decisions.stages[0].ranks)
    rank_of = [stage.ranks[0] // width for stage in plan.decisions.stages]
    # With several ranks a stage, the first of each.
    measured = [figures(each["actions"][::width], rank_of) for each in steps]
    predicted = figures(
        [[(*each.action, each.start_s, each.end_s) for each in rank.events] for rank in timeline.ranks], rank_of
    )
    bubble = statistics.median(each["bubble"] for each in measured)
    step_s = [max(each["step_s"]) for each in steps]
    schedule = plan.decisions.schedule

    def median_of(key: str) -> list[float]:
        return [statistics.median(each) for each in zip(*(found[key] for found in measured), strict=True)]

    transfers = [each["transfer_s"] for each in measured if each["transfer_s"] is not None]
    return {
        "benchmark": "bubble",
        "scenario": scenario,
        "rate": args.rate,
        "burst": args.burst,
        "hosts": args.hosts,
        "calibrated": plan.cluster.get("calibrated", ""),
        "degrees": {axis: size for axis, size in plan.decisions.degrees.items() if size > 1},
        "schedule": schedule.name,
        "interleave": schedule.interleave,
        "microbatches": schedule.num_microbatches,
        "bubble": bubble,
        "predicted_bubble": predicted["bubble"],
        "bubble_ratio": predicted["bubble"] / bubble,
        **spread(step_s),
        "predicted_s": plan.estimates.step_time_s,
        "span_s": statistics.median(each["span_s"] for each in measured),
        "predicted_span_s": predicted["span_s"],
        "computing_s": median_of("computing_s"),
        "predicted_computing_s": predicted["computing_s"],
        "action_s": {
            key: statistics.median(each["action_s"][key] for each in measured) for key in measured[0]["action_s"]
        },
        "predicted_action_s": predicted["action_s"],
        "transfer_s": statistics.median(transfers) if transfers else None,
        "predicted_transfer_s": predicted["transfer_s"],
        "optimizer_s": statistics.median(max(each["optimizer_s"]) for each in steps),
        "predicted_optimizer_s": plan.estimates.breakdown.optimizer_s,
    }


def rows_of(lines: Iterator[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the last line of each case as a row of the table."""
    last = {(e["scenario"], e["rate"], e["hosts"], e["schedule"], bool(e["calibrated"])): e for e in lines}
    return [
        {
            "scenario": each["scenario"].replace("_", " "),
            "hosts": str(each["hosts"]),
            "schedule": each["schedule"],
            "calibrated": "yes" if each["calibrated"] else "no",
            "bubble": f"{each['bubble']:.1%}",
            "predicted bubble": f"{each['predicted_bubble']:.1%}",
            "bubble ratio": f"{each['bubble_ratio']:.2f}",
            "step": f"{each['measured_s']:.3f}",
            "predicted step": f"{each['predicted_s']:.3f}",
            "computing": f"{statistics.mean(each['computing_s']):.3f}",
            "predicted computing": f"{statistics.mean(each['predicted_computing_s']):.3f}",
        }
        for each in last.values()
    ]


def main() -> int:
    """Measure every case asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=["deep_square", "gpt_balanced"])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1"], help="`free`: the search's own")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--burst", default="32kb", help="that links let through at once, tc syntax")
    parser.add_argument("--steps", type=int, default=7, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps a run")
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds a run may take")
    parser.add_argument("--tag", default="bu", help="prefix of the network namespaces")
    parser.add_argument("--cluster", type=Path, help="cluster file instead of the testbed's own, calibrated one")
    parser.add_argument("--table", action="store_true", help="of the lines there are; nothing is run")
    parser.add_argument("--output", type=Path, default=RESULTS / "bubble.jsonl")
    parser.add_argument("--as-rank", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        as_rank(args.as_rank)
        return 0
    if args.table:
        print(markdown(rows_of(map(json.loads, args.output.read_text().splitlines())), COLUMNS))
        return 0
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("bubble: needs root, ip and tc (apt-get install -y iproute2)", file=sys.stderr)
        return SKIP
    import autopar

    with tempfile.TemporaryDirectory() as folder:
        calibrated = HERE / f"cluster_{args.rate}{'' if args.hosts == 2 else f'_{args.hosts}'}_calibrated.yaml"
        own = calibrated if calibrated.is_file() else cluster_of(args.rate, args.hosts, 1, Path(folder))
        cluster = args.cluster or own
        for scenario in args.scenarios:
            for schedule in args.schedules:
                fix: dict[str, Any] = {"pp": args.hosts}
                if schedule != "free":
                    fix["schedule"] = schedule
                model, batch = SCENARIOS[scenario].build()
                plan = autopar.plan(model, cluster, example_inputs=batch, optimizer="adamw", fix=fix)
                path = Path(folder) / "plan.json"
                plan.save(path)
                write(row(scenario, plan, measure(scenario, path, cluster, args), args), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
