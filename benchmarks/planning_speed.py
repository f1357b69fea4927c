"""How long planning Llama-3-8B on 64 H100s takes as the model grows deeper, and how much memory.

    python -m benchmarks.planning_speed --layers 2 4 8 16 32

The whole way from the model's code to the plan, all mesh shapes, each depth in a process of its own: seconds of each
phase, of the processor in all, and the largest resident size of the process. Imports are a phase too. One line of JSON
a depth, on stdout and in benchmarks/results/planning_speed.jsonl.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.progress import Silent
from benchmarks.record import RESULTS, ROOT, write


class Stopwatch(Silent):
    """A `Progress` that keeps the seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name = ""
        self._since = time.perf_counter()

    def phase(self, name: str) -> None:
        """Begin a phase, ending the one before it."""
        now = time.perf_counter()
        if self._name:
            self.seconds[self._name] = round(self.seconds.get(self._name, 0.0) + now - self._since, 3)
        # "search over 9 meshes": the number is no part of the name.
        self._name, self._since = name.partition(" ")[0], now


def plan_once(layers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurement of one depth, taken in this process."""
    watch = Stopwatch()
    watch.phase("import")
    from autopar import api
    from autopar.options import PlanOptions

    options = PlanOptions.parse(
        batch=args.batch, seq=args.seq, set={"layers": layers}, precision="bf16", optimizer="adamw"
    )
    plan = api.plan_reference(args.model, args.cluster, options, watch)
    watch.phase("")
    seconds = watch.seconds
    total = sum(seconds.values())
    return {
        "benchmark": "planning_speed",
        "model": args.model,
        "layers": layers,
        "batch": args.batch,
        "seq": args.seq,
        "cluster": args.cluster,
        "seconds": seconds,
        "total_s": round(total, 3),
        "cpu_s": round(time.process_time(), 3),
        "beside_capture_s": round(total - seconds["capture"] - seconds["import"], 3),
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "predicted_s": plan.estimates.step_time_s,
        "degrees": _used(plan.decisions.degrees),
        "gap": plan.solver.gap,
        "status": plan.solver.status,
        "candidates": plan.solver.candidates,
    }


def _used(degrees: Mapping[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in degrees.items() if size > 1}


def main() -> int:
    """Measure every depth asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--model", default="zoo:llama3-8b", help="any reference whose depth is `--set layers=N`")
    parser.add_argument("--cluster", default="h100-sxm-80gb:8x8")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--here", action="store_true", help="measure in this process, print the line without a stamp")
    parser.add_argument("--output", type=Path, default=RESULTS / "planning_speed.jsonl")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(plan_once(args.layers[0], args)))
        return 0
    for layers in args.layers:
        command = [sys.executable, "-m", "benchmarks.planning_speed", "--here", "--layers", str(layers)]
        for name in ("model", "cluster", "batch", "seq"):
            command += [f"--{name}", str(getattr(args, name))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"planning_speed: {layers} layers: {done.stderr[-4000:]}", file=sys.stderr)
            return 1
        write(json.loads(done.stdout.splitlines()[-1]), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
