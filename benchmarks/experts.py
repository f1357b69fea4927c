"""Whether a plan with everything free is predicted no slower than what experts chose, both priced by us.

    python -m benchmarks.experts                 # configurations of Megatron-LM, GPT of 1.7B to 530B parameters
    python -m benchmarks.experts --rows megatron-0298

The experts' configurations are rows of benchmarks/data/training_steps.csv: model, cluster, batch, and all degrees,
which `--fix` gives to the planner; memory margin and precision (bf16, float32 parameters) are the planner's own in both
plans. One line of JSON a row, on stdout and in benchmarks/results/experts.jsonl; ends with 1 if a free plan is slower.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from typing import Any

import torch

from autopar import api
from autopar.api.planning import Program
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.models import resolve
from autopar.options import PlanOptions
from autopar.progress import Silent
from benchmarks.record import RESULTS, ROOT, write
from cost_models.training_rows import TrainingRow, read_training_row, training_cluster
from cost_models.validation import Skipped

DATA = ROOT / "benchmarks" / "data" / "training_steps.csv"


def compare(row: dict[str, str], read: TrainingRow, time_limit_s: float) -> dict[str, Any]:
    """Return what is predicted of the experts' degrees and of the free plan."""
    sizes = read.architecture
    settings = {
        "layers": str(sizes.layers),
        "hidden": str(sizes.hidden),
        "heads": str(sizes.heads),
        "vocab": str(sizes.vocab),
        "positions": str(read.seq_len),
    }
    found = resolve("zoo:gpt3-175b", batch=read.global_batch, seq=read.seq_len, overrides=settings)
    graph = api.program_of(found.model, found.shallow, found.example_inputs, "bf16")
    cluster = training_cluster(read)
    fixed = {
        "dp_replicate": read.dp,
        "dp_shard": 1,
        "tp": read.tp,
        "pp": read.pp,
        "microbatch": read.micro_batch,
        "recompute": read.recompute,
    }
    if read.pp > 1:
        fixed |= {"schedule": "interleaved_1f1b" if read.interleave > 1 else "1f1b", "interleave": read.interleave}

    def planned(fix: dict[str, Any]) -> tuple[Plan | None, float, str]:
        options = PlanOptions.parse(precision="bf16", optimizer="adamw", fix=fix, time_limit=time_limit_s)
        started = time.perf_counter()
        try:
            plan = api.plan_program(Program(graph, row["model"], torch.__version__), cluster, options, Silent())
        except InfeasibleError as error:
            return None, time.perf_counter() - started, str(error).partition("\n")[0]
        return plan, time.perf_counter() - started, ""

    theirs, _, why = planned(fixed)
    ours, seconds, ours_why = planned({})
    known = ours is not None and theirs is not None
    return {
        "benchmark": "experts",
        "row": row["id"],
        "model": row["model"],
        "gpus": read.gpus,
        "global_batch": read.global_batch,
        "experts": {key: value for key, value in fixed.items() if value != 1},
        "experts_s": theirs.estimates.step_time_s if theirs else None,
        "experts_not": why,
        "free_s": ours.estimates.step_time_s if ours else None,
        "free_not": ours_why,
        "free": _described(ours) if ours else {},
        "gap": ours.solver.gap if ours else None,
        "ratio": ours.estimates.step_time_s / theirs.estimates.step_time_s if known and ours and theirs else None,
        "planning_s": round(seconds, 1),
        "measured_s": float(row["measured_step_s"]),
    }


def _described(plan: Plan) -> dict[str, Any]:
    degrees = {axis: size for axis, size in plan.decisions.degrees.items() if size > 1}
    schedule = plan.decisions.schedule
    ways = sorted(set(plan.decisions.recompute.values()))
    return degrees | {
        "microbatch": plan.workload.microbatch,
        "schedule": schedule.name,
        "interleave": schedule.interleave,
        "recompute": ways,
        "blocks_recomputed": "all" if "*" in plan.decisions.recompute else len(plan.decisions.recompute),
    }


def main() -> int:
    """Compare all rows asked for; return 1 if some free plan is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", help="ids; those of Megatron-LM where none are given")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each search")
    args = parser.parse_args()
    slower = 0
    with DATA.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if _wanted(row, args.rows)]
    for row in rows:
        read = read_training_row(row)
        if isinstance(read, Skipped):
            print(f"{row['id']}: {read}", file=sys.stderr)
            continue
        found = compare(row, read, args.time_limit)
        slower += found["ratio"] is not None and found["ratio"] > 1.0
        write(found, RESULTS / "experts.jsonl")
    return 1 if slower else 0


def _wanted(row: dict[str, str], ids: list[str] | None) -> bool:
    return row["id"] in ids if ids else row["source"] == "megatron_lm"


if __name__ == "__main__":
    sys.exit(main())
