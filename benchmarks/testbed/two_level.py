"""Whether a collective in two levels beats the flat one where its price says so, on hosts with throttled links.

    python -m benchmarks.testbed.two_level --rate 1gbit --hosts 2 --ranks-per-host 2

Both forms run by turns on the same ranks, as compiled programs issue them, in the form in two levels (ranks inside,
chunks) that is cheapest by price. One line of JSON an operation and size: median seconds of each, of the slowest rank,
the median of their ratios in pairs, what the cost model predicts of each, and what a plan would choose. Lines go to
stdout and to benchmarks/results/two_level.jsonl. Needs root and iproute2; ends with 77 where they are missing.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, write
from benchmarks.testbed.compare import HERE, SKIP, cluster_of

OPS = ("all_reduce", "all_gather", "reduce_scatter")


def priced(cluster: Path, op: str, size: int) -> dict[str, Any]:
    """Return what the cost model says of one collective over all ranks: flat, in two levels, and which it takes."""
    from autopar.costs.links import Links, Message
    from cost_models.cluster import ClusterSpec

    spec = ClusterSpec.from_file(cluster)
    links, message = Links(spec, (spec.device_count,), two_level=True), Message(op, 0, size)
    flat, *levels = links.forms(message)
    best = min(levels, key=lambda each: each.seconds)
    return {
        "op": op,
        "bytes": size,
        "inner": best.inner,
        "chunks": best.chunks,
        "predicted_flat_s": flat.seconds,
        "predicted_two_level_s": best.seconds,
        "chosen": "two_level" if links.form(message)[0] > 1 else "flat",
    }


def measure(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the row with what both forms take on the testbed.

    Raises:
        RuntimeError: a rank failed, or the run took too long.
    """
    asked = json.dumps({**row, "repeats": args.repeats})
    command = [
        *(sys.executable, str(HERE / "netrun.py"), "--hosts", str(args.hosts), "--rate", args.rate, "--tag", args.tag),
        *("--ranks-per-host", str(args.ranks_per_host), "--timeout", "120", "--"),
        *(sys.executable, "-m", "benchmarks.testbed.two_level", "--as-rank", asked),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{row} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found = json.loads(lines[-1])
    flat, levels = found["flat"], found["two_level"]
    return {
        **row,
        "measured_flat_s": statistics.median(flat),
        "measured_two_level_s": statistics.median(levels),
        "ratio": round(statistics.median(b / a for a, b in zip(flat, levels, strict=True)), 4),
        "repeats": len(flat),
    }


def as_rank(asked: dict[str, Any]) -> None:
    """Time both forms on this rank; rank 0 prints the seconds of the slowest rank."""
    import torch
    import torch.distributed as dist

    import autopar.rewrite  # noqa: F401  the operators in two levels
    from autopar.ir.mesh import Axis, Mesh
    from autopar.ir.tasks import level_name
    from autopar.runtime import Groups, Ranks

    ranks = Ranks.join("cpu")
    world, inner = ranks.world_size, asked["inner"]
    names = Groups.of(Mesh((Axis("dp", world),)), ranks, levels={("dp", inner)}).names
    groups = (names[level_name("dp", "inner", inner)], names[level_name("dp", "outer", inner)], names["dp"])
    flat, levels = _forms(asked, world, groups)
    seconds: dict[str, list[float]] = {"flat": [], "two_level": []}
    for turn in range(asked["repeats"] + 1):
        for name, run in (("flat", flat), ("two_level", levels)):
            dist.barrier()
            start = time.perf_counter()
            run()
            taken = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if turn:
                seconds[name].append(float(taken))
    if ranks.rank == 0:
        print(json.dumps(seconds))
    dist.destroy_process_group()


def _forms(asked: dict[str, Any], world: int, groups: tuple[str, str, str]) -> tuple[Callable[[], Any], ...]:
    """Return what runs the flat collective, and what runs the one in two levels."""
    import torch

    flat, levels, stream = torch.ops._c10d_functional, torch.ops.autopar_levels, groups[-1]
    count = asked["bytes"] // 4
    whole, part = torch.zeros(count), torch.zeros(count // world)
    wait = flat.wait_tensor
    if asked["op"] == "all_reduce":
        return (
            lambda: wait(flat.all_reduce_(whole, "sum", stream)),
            lambda: wait(levels.all_reduce_([whole], "sum", asked["chunks"], *groups)[0]),
        )
    if asked["op"] == "all_gather":
        return (
            lambda: wait(flat.all_gather_into_tensor(part, world, stream)),
            lambda: wait(levels.all_gather([part], world, *groups)[0]),
        )

    def exchanged() -> Any:  # as the runtime does it on gloo
        splits = [count // world] * world
        return wait(flat.all_to_all_single(whole, splits, splits, stream)).view(world, -1).sum(0)

    return exchanged, lambda: wait(levels.reduce_scatter([whole], "sum", world, *groups)[0])


def main() -> int:
    """Compare both forms at every size asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--kib", nargs="+", type=int, default=[64, 1024, 8192, 32768], help="sizes of the full tensor")
    parser.add_argument("--rate", default="1gbit", help="which has a cluster_RATE.yaml here")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tag", default="ap", help="prefix of the network namespaces")
    parser.add_argument("--output", type=Path, default=RESULTS / "two_level.jsonl")
    parser.add_argument("--as-rank", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        as_rank(args.as_rank)
        return 0
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("two_level: needs root, ip and tc (apt-get install -y iproute2)", file=sys.stderr)
        return SKIP
    about = {"benchmark": "two_level", "rate": args.rate, "hosts": args.hosts, "ranks_per_host": args.ranks_per_host}
    with tempfile.TemporaryDirectory() as folder:
        cluster = cluster_of(args.rate, args.hosts, args.ranks_per_host, Path(folder))
        for op in args.ops:
            for kib in args.kib:
                write({**about, **measure(priced(cluster, op, kib << 10), args)}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
