"""Whether a plan with everything free is predicted no slower than the recipes that an expert would fix by hand.

    python -m benchmarks.folklore                            # all points
    python -m benchmarks.folklore --points mixtral gpt2      # those whose names begin so
    python -m benchmarks.folklore --free                     # the free plans anew, beside recipes as they were measured
    python -m benchmarks.folklore --recipes fsdp ep "tp=2 pp" # a handful: those whose names begin so
    python -m benchmarks.folklore --table                    # the table in docs/ anew, of the last line of each point

A point is a model, a cluster and a batch; a recipe fixes every degree, the micro-batch, the schedule and what is
recomputed, as guides to training at scale have them. Both are priced by us, with the planner's defaults otherwise. One
line of JSON a point, on stdout and in benchmarks/results/folklore.jsonl; ends with 1 if a free plan is slower than a
recipe by more than the search allows itself, or a recipe faster than what the free search says it proved.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from autopar import api
from autopar.api.planning import Program
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.models import resolve
from autopar.options import PlanOptions
from autopar.progress import Silent
from benchmarks.folklore_points import POINTS, Point
from benchmarks.record import RESULTS, ROOT, markdown, renew, write
from cost_models.cluster import ClusterSpec

Fix = dict[str, Any]


def recipes(point: Point, devices: int, per_node: int) -> Iterator[tuple[str, Fix]]:
    """Yield what folklore fixes, by name."""
    yield "ddp", {"dp_replicate": devices, "recompute": "none"}
    for way in ("none", "full"):
        yield f"fsdp {way}", {"dp_shard": devices, "zero": 3, "recompute": way}
        if devices > per_node:
            nodes = devices // per_node
            yield f"hsdp {way}", {"dp_replicate": nodes, "dp_shard": per_node, "zero": 3, "recompute": way}
        yield f"tp={point.tp} {way}", {"tp": point.tp, "dp_shard": devices // point.tp, "zero": 1, "recompute": way}
        for ep in point.eps:
            yield f"ep={ep} {way}", {"ep": ep, "dp_shard": devices // ep, "zero": 3, "recompute": way}
    for cp in point.cps:
        left = {"dp_shard": devices // (cp * point.tp), "zero": 3, "recompute": "full"}
        yield f"cp={cp} tp={point.tp} full", {"cp": cp, "tp": point.tp, **left}
    for pp, size in product(point.pps, point.sizes):
        cut = {"pp": pp, "schedule": "1f1b", "microbatch": size}
        # Across nodes stages are wanted for what tensor parallelism in the node leaves; inside one, in its place.
        tp = point.tp if devices > per_node else 1
        for way, width in product(("selective", "full"), sorted({1, tp})):
            left = {"dp_shard": devices // (width * pp), "zero": 1, **cut, "recompute": way}
            yield f"tp={width} pp={pp} microbatch={size} {way}", {"tp": width, **left}
        for cp in point.cps[:1]:
            left = {"dp_shard": devices // (pp * cp * tp), "zero": 1, **cut, "recompute": "full"}
            yield f"tp={tp} pp={pp} cp={cp} microbatch={size} full", {"tp": tp, "cp": cp, **left}
    for pp, chunks, way in product(point.pps, (2, 4), ("none", "selective", "full")):
        cut = {"pp": pp, "schedule": "interleaved_1f1b", "interleave": chunks, "microbatch": point.sizes[0]}
        for tp in sorted({1, point.tp}):
            left = {"tp": tp, "dp_shard": devices // (tp * pp), "zero": 1, **cut, "recompute": way}
            yield f"tp={tp} pp={pp}x{chunks} microbatch={point.sizes[0]} {way}", left


def compare(name: str, known: dict[str, Any] | None = None, wanted: Sequence[str] = ("",)) -> dict[str, Any]:
    """Return what is predicted of the free plan of a point and of its recipes whose names begin as is `wanted`.

    Recipes are not planned but read from a `known` line, if there is one, whose commit the new one names.
    """
    point = POINTS[name]
    cluster = (
        ClusterSpec.parse(point.cluster) if isinstance(point.cluster, str) else ClusterSpec.from_dict(point.cluster)
    )
    found = resolve(point.model, batch=point.batch, seq=point.seq, overrides=point.set)
    graph = api.program_of(found.model, found.shallow, found.example_inputs, point.precision)
    free, seconds, why = _planned(point, graph, cluster, {})
    times: dict[str, float | None] = {} if known is None else known["recipes_s"]
    refused: dict[str, str] = {} if known is None else known["refused"]
    spent = 0.0 if known is None else known["recipes_planning_s"]
    tried = recipes(point, cluster.device_count, cluster.as_equal().devices_per_node)
    for recipe, fix in tried if known is None else ():
        if 0 in fix.values() or not recipe.startswith(tuple(wanted)):
            continue  # more ranks than there are, or not asked for
        one = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp"), 1) | fix
        if one["dp_shard"] == 1:
            one.pop("zero", None)  # nobody to share with: asked for, that would be a mistake
        plan, took, not_ = _planned(point, graph, cluster, one)
        times[recipe] = plan.estimates.step_time_s if plan else None
        spent += took
        if plan is None:
            refused[recipe] = not_
    fit = {recipe: each for recipe, each in times.items() if each is not None}
    best = min(fit, key=fit.__getitem__, default=None)
    free_s = free.estimates.step_time_s if free else None
    return {
        "benchmark": "folklore",
        "point": name,
        "model": point.model,
        "cluster": cluster.name,
        "devices": cluster.device_count,
        "batch": point.batch,
        "seq": point.seq,
        "free_s": free_s,
        "free": _described(free) if free else why,
        "gap": free.solver.gap if free else None,
        "bound_s": free.solver.bound if free else None,
        "status": free.solver.status if free else None,
        "best_recipe": best,
        "best_recipe_s": fit[best] if best else None,
        "ratio": free_s / fit[best] if best and free_s else None,
        "recipes_s": times,
        "refused": refused,
        "planning_s": round(seconds, 1),
        "recipes_planning_s": round(spent, 1),
        **({} if known is None else {"recipes_commit": known.get("recipes_commit", known["commit"])}),
    }


def _planned(point: Point, graph: Graph, cluster: ClusterSpec, fix: Fix) -> tuple[Plan | None, float, str]:
    options = PlanOptions.parse(precision=point.precision, optimizer="adamw", fix=fix)
    started = time.process_time()
    try:
        program = Program(graph, point.model, torch.__version__)
        plan = api.plan_program(program, cluster, options, Silent())
    except AutoparError as error:
        return None, time.process_time() - started, str(error).partition("\n")[0]
    return plan, time.process_time() - started, ""


def _described(plan: Plan) -> dict[str, Any]:
    used = {axis: size for axis, size in plan.decisions.degrees.items() if size > 1}
    ways = sorted(set(plan.decisions.recompute.values())) or ["none"]
    schedule = {"schedule": plan.decisions.schedule.name} if used.get("pp") else {}
    parts = plan.workload.num_microbatches
    return used | schedule | {"microbatches": parts, "recompute": "+".join(ways)}


def _is_slower(row: dict[str, Any], tolerance: float = 0.01) -> bool:
    if row["best_recipe_s"] is None:
        return False
    proven = row["bound_s"] is None or row["best_recipe_s"] >= row["bound_s"] * (1.0 - 1e-6)
    return row["free_s"] is None or row["free_s"] > row["best_recipe_s"] * (1.0 + tolerance) or not proven


def _last(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last line of each point; none where nothing was measured yet."""
    if not path.exists():
        return {}
    return {row["point"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def _table(path: Path) -> str:
    last = _last(path)
    rows = [last[name] for name in POINTS if name in last]
    names = {
        "free_s": "free (s)",
        "best_recipe_s": "best recipe (s)",
        "best_recipe": "recipe",
        "planning_s": "planning (s)",
    }
    columns = (
        "model",
        "cluster",
        "batch",
        "seq",
        "free_s",
        "best_recipe_s",
        "ratio",
        "best_recipe",
        "free",
        "gap",
        "planning_s",
    )
    shown = [{names.get(key, key): row[key] for key in columns} for row in rows]
    return markdown(shown, [names.get(key, key) for key in columns])


def main() -> int:
    """Compare all points asked for, each in a process of its own; return 1 if some free plan is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--points", nargs="*", default=[""], help="what their names begin with; all where none are given"
    )
    parser.add_argument("--recipes", nargs="*", default=[""], help="what the names of those to try begin with; all")
    parser.add_argument("--here", action="store_true", help="in this process, one line without a stamp")
    parser.add_argument("--free", action="store_true", help="recipes as in the last line of a point, where it has one")
    parser.add_argument("--table", action="store_true", help="write the table in docs/ anew, and nothing else")
    parser.add_argument("--output", type=Path, default=RESULTS / "folklore.jsonl")
    args = parser.parse_args()
    if args.table:
        renew({"folklore": _table(args.output)})
        return 0
    slower = False
    # A whole name is that point alone: what a process of its own is asked for must not be another, longer name.
    wanted = (
        [start] if start in POINTS else [each for each in POINTS if each.startswith(start)] for start in args.points
    )
    for name in (each for names in wanted for each in names):
        if args.here:
            known = _last(args.output).get(name) if args.free else None
            sys.stdout.write(json.dumps(compare(name, known, args.recipes)) + "\n")
            continue
        command = [sys.executable, "-m", "benchmarks.folklore", "--here", "--points", name]
        command += ["--output", str(args.output), *(["--free"] if args.free else []), "--recipes", *args.recipes]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        slower |= _is_slower(row)
        write(row, args.output)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
