"""Which operators a CPU's prices are wrong about: seconds of each kind of operator in a step, predicted and measured.

    python -m autopar calibrate -c CLUSTER.yaml -o FILE.json       # of one rank, which CLUSTER.yaml names
    python -m benchmarks.operators --cluster CLUSTER.yaml --programs resnet llama

Programs of the testbed run on one rank with one thread as they are compiled for it: forward, backward and AdamW.
Every operator is timed where it runs, with what its neighbours left in caches; of several steps each operator's median
counts. Predicted are the seconds in the plan. Operators whose results are written where an argument was count as the
same ones. One line of JSON a program, on stdout and in benchmarks/results/operators.jsonl; --summary tells, over all
programs, by how much each kind of operator moves the predicted step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.forks import fork
from benchmarks.record import RESULTS, write
from benchmarks.testbed.step import PROGRAMS

SEEN = 0.005
"""Share of a step from which an operator's error is told."""

Found = dict[str, float]
"""Seconds of each kind of operator."""


class Stopwatch(TorchDispatchMode):
    """Times every operator that is dispatched, by its place in the order of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        start = time.perf_counter()
        made = func(*args, **(kwargs or {}))
        self.calls.append((str(func), time.perf_counter() - start))
        return made


def kind(target: str) -> str:
    """Return what an operator is called where it writes new memory: `aten.add` for aten.add_.Tensor."""
    return ".".join(target.split(".")[:2]).removesuffix("_")


def measured(model: Any, batch: tuple[Any, ...], steps: int) -> tuple[Found, float]:
    """Return the seconds of each kind of operator in forward and backward, and those of the whole step, untimed within.

    Of each operator the median over the steps counts, where all steps have the same operators.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    whole, watched = [], []
    for number in range(2 * steps + 2):
        watch = Stopwatch() if number % 2 else None
        start = time.perf_counter()
        if watch is None:
            model(*batch).backward()
        else:
            with watch:
                model(*batch).backward()
        spent = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad()
        if number > 1:
            watched.append(watch.calls) if watch else whole.append(spent)
    total: Found = defaultdict(float)
    for calls in zip(*watched, strict=True):
        total[kind(calls[0][0])] += statistics.median(seconds for _, seconds in calls)
    return total, statistics.median(whole)


def predicted(plan: Any) -> Found:
    """Return the seconds that a plan has for each kind of operator."""
    total: Found = defaultdict(float)
    for each in plan.decisions.operators.values():
        total[kind(each.target)] += each.predicted_s * each.instances
    return total


def compare(name: str, cluster: Path, steps: int) -> dict[str, Any]:
    """Return the row of one program."""
    import autopar

    model, batch = PROGRAMS[name].build()
    plan = autopar.plan(model, cluster, example_inputs=batch, optimizer="adamw")
    thought = predicted(plan)
    taken, whole_s = measured(autopar.compile(model, cluster, example_inputs=batch, plan=plan), batch, steps)
    kinds = sorted(thought.keys() | taken.keys(), key=lambda each: -abs(taken.get(each, 0) - thought.get(each, 0)))
    return {
        "benchmark": "operators",
        "program": name,
        "predicted_s": sum(thought.values()),
        "measured_s": whole_s,
        "operators": {each: [thought.get(each, 0.0), taken.get(each, 0.0)] for each in kinds},
    }


def _measure(name: str, cluster: Path, steps: int, output: Path) -> None:
    torch.set_num_threads(1)
    write(compare(name, cluster, steps), output)


def summary(path: Path, most: int = 25) -> str:
    """Return, of the last line of each program, the steps and the operators that err most, in shares of a step."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = {line["program"]: line for line in lines}.values()
    told = [f"{r['program']}: {r['predicted_s']:.3f} / {r['measured_s']:.3f} s" for r in rows]
    errors: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for row in rows:
        for each, (thought, taken) in row["operators"].items():
            errors[each].append(((thought - taken) / row["measured_s"], thought / (taken or math.inf), row["program"]))
    order = sorted(errors, key=lambda each: -sum(abs(share) for share, *_ in errors[each]))
    for each in order[:most]:
        parts = [f"{name} {share:+.1%} (x{ratio:.2f})" for share, ratio, name in errors[each] if abs(share) >= SEEN]
        told.append(f"{each}: {', '.join(parts)}")
    return "\n".join(told) + "\n"


def main() -> int:
    """Compare the programs asked for, each in a process of its own, and print what errs most."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--cluster", type=Path, help="of one rank, calibrated")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a program may take")
    parser.add_argument("--summary", action="store_true", help="of the lines there are; nothing is run")
    parser.add_argument("--output", type=Path, default=RESULTS / "operators.jsonl")
    args = parser.parse_args()
    for name in [] if args.summary else args.programs:
        error = fork([(_measure, (name, args.cluster, args.steps, args.output), {})], args.timeout)
        if error:
            sys.stderr.write(f"operators: {name}: {error}\n")
    sys.stdout.write(summary(args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
