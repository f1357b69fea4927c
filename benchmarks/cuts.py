"""Pipelines cut as the closed form has it beside those cut as the simulator has it: predicted and measured.

    python -m benchmarks.cuts --layers 12 16 --microbatches 4 2

A GPT whose head takes as long as several layers trains on two gloo ranks of this machine, one thread each, under two
plans that differ in nothing but where it is cut; a step of one, a step of the other. Kept are both predicted steps, the
medians of both measured ones and the median of the paired ratios. One line of JSON a case, on stdout and in
benchmarks/results/cuts.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.forks import fork, free_port, variables
from benchmarks.record import RESULTS, write

_RANKS = 2
_WARM = 4


def build(layers: int, vocab: int) -> tuple[Any, dict[str, Any]]:
    """Return the model and its keyword arguments, equal on every rank."""
    from benchmarks.testbed.scenarios import Scenario

    model, (ids, labels) = Scenario(width=256, depth=layers, batch=16, seq=128, vocab=vocab).build()
    return model, {"x": ids, "y": labels}


def _plan(case: dict[str, Any], *, simulated: bool, out: Path) -> None:
    import autopar
    from autopar.api.pipelining import _Placed

    fix = {"pp": _RANKS, "schedule": case["schedule"], "microbatch": case["microbatches"], "recompute": "none"}
    model, inputs = build(case["layers"], case["vocab"])
    with patch.object(_Placed, "climbed", _Placed.climbed if simulated else lambda self, tried: []):
        autopar.plan(model, f"cpu:{_RANKS}", example_inputs=inputs, fix=fix).save(out)


def _rank(case: dict[str, Any], plans: list[Path], steps: int, out: Path) -> None:
    import torch
    import torch.distributed as dist

    import autopar

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained = []
    for path in plans:
        model, inputs = build(case["layers"], case["vocab"])
        plan = autopar.Plan.load(path)
        cluster = autopar.ClusterSpec.from_dict(plan.cluster)
        compiled = autopar.compile(model, cluster, example_inputs=inputs, plan=plan)
        trained.append((compiled, torch.optim.AdamW(compiled.parameters(), lr=1e-4), list[float]()))
    for step in range(_WARM + steps):
        for compiled, optimizer, seconds in trained:
            dist.barrier()
            start = time.perf_counter()
            compiled(**inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if step >= _WARM:
                seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        out.write_text(json.dumps([seconds for *_, seconds in trained]), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run(case: dict[str, Any], steps: int, timeout_s: float) -> dict[str, Any]:
    """Return the row of a case.

    Raises:
        RuntimeError: planning or running failed.
    """
    from autopar.ir.plan import Plan

    row: dict[str, Any] = {"benchmark": "cuts", **case}
    with tempfile.TemporaryDirectory() as folder:
        plans = [Path(folder) / f"{name}.json" for name in ("closed_form", "simulated")]
        for path in plans:
            if error := fork([(partial(_plan, simulated=path is plans[1], out=path), (case,), {})], timeout_s):
                raise RuntimeError(error)
        out, port = Path(folder) / "seconds.json", str(free_port())
        work = [(_rank, (case, plans, steps, out), variables(rank, _RANKS, port)) for rank in range(_RANKS)]
        if error := fork(work, timeout_s):
            raise RuntimeError(error)
        measured = json.loads(out.read_text(encoding="utf-8"))
        for path, seconds in zip(plans, measured, strict=True):
            made = Plan.load(path)
            row[path.stem] = {
                "blocks": [len(stage.blocks) for stage in made.decisions.stages],
                "predicted_s": made.estimates.step_time_s,
                "measured_s": statistics.median(seconds),
            }
    row["predicted_ratio"] = row["simulated"]["predicted_s"] / row["closed_form"]["predicted_s"]
    row["measured_ratio"] = statistics.median(new / old for old, new in zip(*measured, strict=True))
    return {**row, "repeats": steps}


def main() -> int:
    """Run every case asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", nargs="+", type=int, default=[12, 16])
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 2])
    parser.add_argument("--schedules", nargs="+", default=["zbv"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--timeout", type=float, default=240.0, help="seconds that planning, and running, may take each"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "cuts.jsonl")
    args = parser.parse_args()
    for layers in args.layers:
        for microbatches in args.microbatches:
            for schedule in args.schedules:
                case = {"layers": layers, "vocab": args.vocab, "microbatches": microbatches, "schedule": schedule}
                write(run(case, args.steps, args.timeout), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
