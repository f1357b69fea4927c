"""Whether a plan with everything free is predicted no slower than the recipes that an expert would fix by hand.

    python -m benchmarks.folklore                            # all points
    python -m benchmarks.folklore --points mixtral gpt2      # those whose names begin so
    python -m benchmarks.folklore --free                     # the free plans anew, beside recipes as they were measured
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
from collections.abc import Iterator
from dataclasses import dataclass, field
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
from benchmarks.record import RESULTS, ROOT, markdown, renew, write
from cost_models.cluster import ClusterSpec

Fix = dict[str, Any]

_ETHERNET = {
    "version": 1,
    "name": "8x8 A100 on 25 Gbit/s",
    "nodes": {"hgx": {"preset": "dgx-a100-80gb", "nic": {"bandwidth": "25Gbit/s", "latency": "25us"}}},
    "groups": [{"node": "hgx", "count": 8}],
}
_MIXED = {
    "version": 1,
    "name": "2 DGX H100 beside 2 DGX A100",
    "nodes": {"new": {"preset": "dgx-h100"}, "old": {"preset": "dgx-a100-80gb"}},
    "groups": [{"node": "new", "count": 2}, {"node": "old", "count": 2}],
}
_SINGLES = {
    "version": 1,
    "name": "16 hosts of one L4 on 25 Gbit/s",
    "nodes": {"host": {"device": "l4", "count": 1, "nic": {"bandwidth": "25Gbit/s", "latency": "20us"}}},
    "groups": [{"node": "host", "count": 16}],
}
_THREE = {
    "version": 1,
    "name": "3x8 A100 on 100 Gbit/s",
    "nodes": {"hgx": {"preset": "dgx-a100-80gb", "nic": {"bandwidth": "100Gbit/s", "latency": "5us"}}},
    "groups": [{"node": "hgx", "count": 3}],
}
_MANY: dict[str, Any] = {"tp": 8, "pps": (4, 8)}


@dataclass(frozen=True)
class Point:
    """What is planned, and the sizes with which an expert would try the recipes."""

    model: str
    cluster: str | dict[str, Any]
    batch: int
    seq: int | None = None
    precision: str = "bf16"
    tp: int = 2
    """Ranks along which tensors are split, in the recipes that split them."""

    pps: tuple[int, ...] = ()
    """Pipeline ranks, in those that have stages."""

    cps: tuple[int, ...] = ()
    eps: tuple[int, ...] = ()
    sizes: tuple[int, ...] = (1, 2)
    """Samples of a micro-batch, in the recipes that cut the batch in time."""

    set: dict[str, str] = field(default_factory=dict)


POINTS = {
    "gpt2-8h100": Point("zoo:gpt2", "dgx-h100", 64, 1024, pps=(2,), sizes=(4,)),
    "gpt2-laptop": Point("zoo:gpt2", "cpu:4", 8, 256, "fp32", pps=(2, 4), sizes=(1, 2)),
    "bert-8l4": Point("zoo:bert-large", "l4:8", 256, 512, pps=(2,), sizes=(4, 8)),
    "bert-2x4090": Point("zoo:bert-large", "workstation-2x4090", 32, 512, pps=(2,), sizes=(2, 4)),
    "vit-ethernet": Point("zoo:vit-h", _ETHERNET, 512, pps=(2, 8), sizes=(2, 8)),
    "t5-32h100": Point("zoo:t5-large", "dgx-h100x4", 256, 512, pps=(2,), sizes=(4,)),
    "resnet-8l4": Point("zoo:resnet50", "l4:8", 512),
    "unet-8h100": Point("benchmarks.folklore:unet", "dgx-h100", 64, pps=(2,), sizes=(2,)),
    "1b-2x4090": Point("zoo:llama3-1b", "workstation-2x4090", 8, 2048, pps=(2,)),
    "1b-long": Point("zoo:llama3-1b", "dgx-h100", 8, 32768, cps=(2, 8), pps=(2,), sizes=(1,)),
    "8b-8h100": Point("zoo:llama3-8b", "dgx-h100", 32, 8192, tp=4, pps=(2,)),
    "8b-32h100": Point("zoo:llama3-8b", "dgx-h100x4", 128, 8192, tp=4, pps=(2, 4)),
    "8b-32k": Point("zoo:llama3-8b", "dgx-h100x4", 8, 32768, tp=8, pps=(2, 4), cps=(2, 4, 8), sizes=(1,)),
    "8b-131k": Point("zoo:llama3-8b", "dgx-h100x4", 4, 131072, tp=8, pps=(2, 4), cps=(2, 4, 8), sizes=(1,)),
    "8b-mixed": Point("zoo:llama3-8b", _MIXED, 128, 4096, tp=4, pps=(2, 4)),
    "8b-ethernet": Point("zoo:llama3-8b", _ETHERNET, 256, 4096, tp=8, pps=(2, 8)),
    "70b-128h100": Point("zoo:llama3-70b", "dgx-h100x16", 128, 8192, **_MANY),
    "70b-512a100": Point("zoo:llama3-70b", "dgx-a100-80gbx64", 1024, 4096, **_MANY),
    "70b-131k": Point("zoo:llama3-70b", "dgx-h100x16", 4, 131072, **_MANY, cps=(4, 8, 16), sizes=(1,)),
    "mixtral-32h100": Point("zoo:mixtral-8x7b", "dgx-h100x4", 128, 4096, eps=(8,), pps=(4,), tp=4),
    "deepseek-32h100": Point("zoo:deepseek-v2-lite", "dgx-h100x4", 256, 4096, eps=(8, 32), pps=(2,)),
    "gpt13b-64a100": Point("zoo:gpt3-13b", "dgx-a100-80gbx8", 256, 2048, tp=4, pps=(2, 4, 8)),
    "llama2-70b-64h100": Point("zoo:llama2-70b", "dgx-h100x8", 128, 4096, tp=8, pps=(2, 4), sizes=(1,)),
    "llama2-7b-16a100": Point("zoo:llama2-7b", "dgx-a100-40gbx2", 64, 4096, tp=4, pps=(2, 4)),
    "gpt2xl-8v100": Point("zoo:gpt2-xl", "dgx-1-v100", 64, 1024, "fp16", tp=4, pps=(2, 4)),
    "gpt6.7b-24a100": Point("zoo:gpt3-6.7b", _THREE, 96, 2048, pps=(3, 6)),
    "llama1b-16l4": Point("zoo:llama3-1b", _SINGLES, 128, 2048, pps=(2, 4, 8)),
    "mixtral22b-64h100": Point("zoo:mixtral-8x22b", "dgx-h100x8", 128, 4096, tp=4, pps=(4, 8), eps=(8,), sizes=(1,)),
    "llama8b-16h200": Point("zoo:llama3-8b", "p5enx2", 512, 8192, pps=(2,)),
    "bert-16t4": Point("zoo:bert-large", "t4:4x4", 256, 512, "fp16", pps=(2, 4), sizes=(2, 4)),
    "405b-512h100": Point("zoo:llama3-405b", "dgx-h100x64", 512, 8192, tp=8, pps=(8, 16), sizes=(1,)),
}


def unet(batch: int = 64) -> Any:
    """Return a U-Net of the width and depth of the first ones, and images of 256 x 256 with labels."""
    from benchmarks.unet import UNet

    images = torch.empty(batch, 3, 256, 256)
    return UNet(width=64, levels=4), (images, torch.zeros(batch, 256, 256, dtype=torch.long))


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
        for way in ("selective", "full"):
            left = {"dp_shard": devices // (tp * pp), "zero": 1, **cut, "recompute": way}
            yield f"tp={tp} pp={pp} microbatch={size} {way}", {"tp": tp, **left}
        for cp in point.cps[:1]:
            left = {"dp_shard": devices // (pp * cp * tp), "zero": 1, **cut, "recompute": "full"}
            yield f"tp={tp} pp={pp} cp={cp} microbatch={size} full", {"tp": tp, "cp": cp, **left}
    for pp, chunks, way in product(point.pps, (2, 4), ("none", "selective", "full")):
        cut = {"pp": pp, "schedule": "interleaved_1f1b", "interleave": chunks, "microbatch": point.sizes[0]}
        for tp in sorted({1, point.tp}):
            left = {"tp": tp, "dp_shard": devices // (tp * pp), "zero": 1, **cut, "recompute": way}
            yield f"tp={tp} pp={pp}x{chunks} microbatch={point.sizes[0]} {way}", left


def compare(name: str, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what is predicted of the free plan of a point and of all its recipes.

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
    tried = recipes(point, cluster.device_count, cluster.devices_per_node)
    for recipe, fix in tried if known is None else ():
        if 0 in fix.values():
            continue  # more ranks than there are
        one = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp"), 1) | fix
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
    parser.add_argument("--here", action="store_true", help="in this process, one line without a stamp")
    parser.add_argument("--free", action="store_true", help="recipes as in the last line of a point, where it has one")
    parser.add_argument("--table", action="store_true", help="write the table in docs/ anew, and nothing else")
    parser.add_argument("--output", type=Path, default=RESULTS / "folklore.jsonl")
    args = parser.parse_args()
    if args.table:
        renew({"folklore": _table(args.output)})
        return 0
    slower = False
    for name in (each for start in args.points for each in POINTS if each.startswith(start)):
        if args.here:
            known = _last(args.output).get(name) if args.free else None
            sys.stdout.write(json.dumps(compare(name, known)) + "\n")
            continue
        command = [sys.executable, "-m", "benchmarks.folklore", "--here", "--points", name]
        command += ["--output", str(args.output), *(["--free"] if args.free else [])]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        slower |= _is_slower(row)
        write(row, args.output)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
