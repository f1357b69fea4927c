"""One rank's share of a plan for several GPUs, run on one GPU: its memory and its computation, predicted and measured.

    python -m benchmarks.shares_on_gpu --plan out/shares       # anywhere: searches the plans
    python -m benchmarks.shares_on_gpu --measure out/shares    # on a machine with one GPU
    python -m benchmarks.shares_on_gpu --table                 # into docs/accuracy/single_gpu.md

The rank is the first of its job; its process group is torch's fake one, whose collectives return at once and leave in
their results what was there. So the numbers that a step computes mean nothing, while every kernel, every buffer and
every collective's memory are those of the real program. Measured are the step's seconds (predicted: computation alone),
the most bytes that torch's allocator held, in forward and backward and in the whole step, and what the device had in
use. Lines go to benchmarks/results/shares_on_gpu.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.single_gpu import Case

OUTPUT = record.RESULTS / "shares_on_gpu.jsonl"
_WARM_UP, _RUNS = 2, 5

_LLAMA = {"hidden_size": "4096", "num_hidden_layers": "8", "num_attention_heads": "32", "num_key_value_heads": "8",
          "intermediate_size": "14336", "vocab_size": "128256", "max_position_embeddings": "4096"}  # fmt: skip
CASES: Mapping[str, tuple[Case, str, dict[str, Any]]] = {
    "llama_zero3": (Case("llama", 16, 4096, _LLAMA), "h100-sxm-80gb:8", {"dp_shard": 8, "zero": 3}),
    "llama_tp8": (Case("llama", 4, 4096, _LLAMA), "h100-sxm-80gb:8", {"tp": 8}),
    "llama_tp2_zero3": (
        Case("llama", 16, 4096, _LLAMA), "h100-sxm-80gb:8", {"tp": 2, "dp_shard": 4, "zero": 3, "recompute": "full"}
    ),
}  # fmt: skip
"""Model and batch, cluster, what is fixed."""


def make_plan(name: str, folder: Path) -> None:
    """Search the plan of a case and save it."""
    import autopar

    case, cluster, fix = CASES[name]
    model, inputs = case.build("meta")
    plan = autopar.plan(model, cluster, example_inputs=inputs, precision="bf16", optimizer="adamw", fix=fix)
    plan.save(folder / f"{name}.json")


def share(name: str, plan_file: Path, device: str) -> dict[str, Any]:
    """Return what the first rank's share of a plan takes on this machine, beside what the plan says."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import autopar
    from autopar.runtime import optimizers
    from autopar.runtime.ranks import Ranks

    plan = autopar.Plan.load(plan_file)
    cluster = autopar.ClusterSpec.from_dict(plan.cluster)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cluster.device_count)
    # The other ranks say what this one says, and no trial of an optimizer can compare what collectives give.
    optimizers._try_distributed = lambda *_, **__: frozenset()
    Ranks.gather = lambda self, value: [value] * self.world_size  # type: ignore[method-assign]
    Ranks.from_first = lambda self, value: value  # type: ignore[method-assign]
    case = CASES[name][0]
    inputs = case.build("meta")[1]
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(case.settings["vocab_size"])
    batch = {key: torch.randint(vocabulary, each.shape, generator=generator).to(device) for key, each in inputs.items()}
    compiled = autopar.compile(
        case.build("meta")[0], cluster, example_inputs=inputs, plan=plan, init_fn=_initialise, device=device
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-4)

    def gradients() -> None:
        output = compiled(**batch)
        (output["loss"] if isinstance(output, dict) else output.loss).backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(_WARM_UP + _RUNS):
        start = time.perf_counter()
        gradients()
        update()
        wait()
        seconds.append(time.perf_counter() - start)
    estimates = plan.estimates
    found = record.spread(seconds[_WARM_UP:]) | {
        "predicted_compute_s": estimates.breakdown.compute_s + estimates.breakdown.optimizer_s,
        "predicted_step_s": estimates.step_time_s,
        "predicted_bytes": estimates.peak_memory_bytes,
        "predicted_reserved": estimates.memory.reserved,
    }
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        gradients()
        found["gradients_peak_bytes"] = torch.cuda.max_memory_allocated()
        update()
        free, total = torch.cuda.mem_get_info()
        found |= {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "used_bytes": total - free,
        }
    return found


def _initialise(module: Any) -> None:
    for each in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        each.data.normal_(std=0.02) if each.dim() > 1 else each.data.fill_(1.0)


def table(path: Path) -> list[dict[str, Any]]:
    """Return rows of what was measured beside what the plans say."""
    rows = []
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        bytes_ = line["predicted_bytes"] - line["predicted_reserved"]
        rows.append(
            {
                "plan": line["case"],
                "fixed": CASES[line["case"]][2],
                "computing, s": f"{line['measured_s']:.4f}",
                "predicted": f"{line['predicted_compute_s']:.4f}",
                "error": f"{line['predicted_compute_s'] / line['measured_s'] - 1:+.1%}",
                "peak, GiB": f"{line['gradients_peak_bytes'] / 2**30:.2f}",
                "predicted, GiB": f"{bytes_ / 2**30:.2f}",
                "error of memory": f"{bytes_ / line['gradients_peak_bytes'] - 1:+.1%}",
            }
        )
    return rows


def main() -> int:
    """Do what was asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--plan", type=Path, help="folder for plans")
    parser.add_argument("--measure", type=Path, help="folder of plans")
    parser.add_argument("--on", default="cuda", help="torch's device")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds that a case may take")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    if args.alone:
        found = share(args.alone, args.measure / f"{args.alone}.json", args.on)
        sys.stdout.write(json.dumps({"benchmark": "shares_on_gpu", "case": args.alone, **found}) + "\n")
        return 0
    if args.table:
        rows = table(args.output)
        record.renew({"shares on one GPU": record.markdown(rows, list(rows[0]))})
        return 0
    for name in args.cases:
        if args.plan:
            args.plan.mkdir(parents=True, exist_ok=True)
            make_plan(name, args.plan)
        if args.measure:
            words = [sys.executable, "-m", "benchmarks.shares_on_gpu", "--alone", name, "--measure", str(args.measure)]
            try:
                done = subprocess.run(
                    [*words, "--on", args.on],
                    cwd=record.ROOT,
                    capture_output=True,
                    text=True,
                    timeout=args.timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                sys.stderr.write(f"shares_on_gpu: {name}: not done in {args.timeout:.0f} s\n")
                continue
            if done.returncode:
                sys.stderr.write(f"shares_on_gpu: {name}: {done.stderr[-1500:]}\n")
                continue
            record.write(json.loads(done.stdout.splitlines()[-1]), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
