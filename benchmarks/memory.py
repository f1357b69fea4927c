"""How much memory a planned program really takes on each rank, beside what the plan says: models x plans.

    python -m benchmarks.memory --models llama resnet --plans dp pp

Measured on gloo ranks by torch's CPU allocator (memory events of torch.profiler): what lies there before a step
(parameters, buffers, optimizer state, batch) and the most that forward and backward allocate beyond it, gradients
included, of the rank that takes most. Predicted: `estimates.peak_memory_bytes` less the reserve, which stands for the
process itself. The optimizer's own temporaries are told apart (`optimizer_peak_bytes`: what its step holds at most).
One line of JSON a case, on stdout and in benchmarks/results/memory.jsonl; --table FILE writes a Markdown table. Ends
with 1 if a case is further off than --limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.forks import fork, free_port, variables
from benchmarks.record import RESULTS, markdown, write

MODELS = ("mlp", "llama", "gpt2", "bert", "t5", "vit", "resnet", "mixtral", "mamba", "unet", "whisper")
_LARGER: dict[str, dict[str, Any]] = {"resnet": {"image_size": 128}}
"""Settings of models whose small configuration ends in planes of one pixel, for which kernels are others."""

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "microbatch": (1, {"microbatch": 2}),
    "dp": (2, {"dp_replicate": 2}),
    "tp": (2, {"tp": 2}),
    "zero": (2, {"dp_shard": 2, "zero": 3}),
    "microbatch-zero": (2, {"dp_shard": 2, "zero": 3, "microbatch": 2}),
    "pp": (2, {"pp": 2, "microbatch": 2}),
    "recompute": (2, {"dp_replicate": 2, "recompute": "full"}),
    "zero-recompute": (2, {"dp_shard": 2, "zero": 3, "recompute": "full"}),
    "pp-tp": (4, {"pp": 2, "tp": 2, "microbatch": 2}),
    "pp-zero": (4, {"pp": 2, "dp_shard": 2, "zero": 3, "microbatch": 2}),
    "tp-zero": (4, {"tp": 2, "dp_shard": 2, "zero": 3}),
}
"""Ranks, and what is fixed."""


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a model in training mode and its keyword arguments, equal on every rank.

    Large enough that tensors are far larger than scalars and counters, which nobody predicts.
    """
    if name == "unet":
        from benchmarks.unet import example

        return example(8)
    if name != "mlp":
        from autopar.models.hf_tiny import tiny

        return tiny(name, **_LARGER.get(name, {}))
    from benchmarks.testbed.scenarios import Scenario

    model, (x, y) = Scenario(width=256, depth=4, batch=64).build()
    return model.train(), {"x": x, "y": y}


def make_plan(name: str, plan: str, out: Path) -> None:
    """Search the plan of a case and save it."""
    import autopar

    model, inputs = build(name)
    ranks, fix = PLANS[plan]
    autopar.plan(model, f"cpu:{ranks}", example_inputs=inputs, fix=fix, optimizer="adamw").save(out)


def rank_main(name: str, plan: Path, out: Path) -> None:
    """Run a plan on this rank, and on rank 0 save what each rank held."""
    import autopar
    from autopar.runtime.ranks import Ranks

    model, inputs = build(name)
    loaded = autopar.Plan.load(plan)
    ranks = Ranks.join("cpu")
    compiled = autopar.compile(model, autopar.ClusterSpec.from_dict(loaded.cluster), example_inputs=inputs, plan=loaded)
    found = ranks.gather(measure(compiled, inputs))
    if ranks.rank == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    ranks.gather(None)


def measure(model: Any, inputs: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that a step holds: before, beyond that in forward and backward, beyond that in the optimizer."""
    import torch

    from autopar.runtime.witness import allocated, storage_bytes

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def gradients() -> None:
        output = model(**inputs)
        loss = output["loss"] if isinstance(output, dict) else getattr(output, "loss", output)
        loss.backward()

    gradients()
    optimizer.step()
    optimizer.zero_grad()
    state = [each for of in optimizer.state.values() for each in of.values() if isinstance(each, torch.Tensor)]
    before = storage_bytes([*model.parameters(), *model.buffers(), *state, *inputs.values()])
    found = []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        found.append(allocated(gradients))
    # gloo's thread may let go of what it reduced late, even after the step: 64 KiB more, seen in one step of six. That
    # is the machine's, not the program's, and only ever adds.
    peak, left = min(found)
    held, _ = allocated(optimizer.step)
    return {"before": before, "peak": peak, "left": left, "optimizer": held}


_STEPS = 5
"""Steps that are measured; the one of the least peak counts."""


def run_case(name: str, plan: str, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Return the row of one case."""
    from autopar.ir.plan import Plan

    row: dict[str, Any] = {"benchmark": "memory", "model": name, "plan": plan}
    planned, told = folder / "plan.json", folder / "result.json"
    for old in (planned, told):
        old.unlink(missing_ok=True)
    error = fork([(make_plan, (name, plan, planned), {})], timeout_s)
    if not error:
        ranks, port = PLANS[plan][0], str(free_port())
        work = [(rank_main, (name, planned, told), variables(rank, ranks, port)) for rank in range(ranks)]
        error = fork(work, timeout_s)
    if error:
        return {**row, "ok": False, "error": error.strip().splitlines()[-1][:300]}
    estimates = Plan.load(planned).estimates
    of_ranks = json.loads(told.read_text(encoding="utf-8"))
    worst = max(of_ranks, key=lambda each: each["before"] + each["peak"])
    measured = worst["before"] + worst["peak"]
    terms = {key: getattr(estimates.memory, key) for key in _TERMS}
    predicted = estimates.peak_memory_bytes - estimates.memory.reserved
    return {
        **row,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "ratio": predicted / measured,
        "before_bytes": worst["before"],
        "optimizer_peak_bytes": worst["before"] + worst["left"] + worst["optimizer"],
        "terms": terms,
    }


_TERMS = ("parameters", "gradients", "optimizer", "activations", "temporary")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    ratios = [abs(row["ratio"] - 1) for row in rows if "ratio" in row]
    columns = ["model", "plan", "predicted_bytes", "measured_bytes", "ratio", "error"]
    said = [{**row, "ratio": f"{row['ratio']:.3f}" if "ratio" in row else None} for row in rows]
    near = sum(each <= 0.05 for each in ratios)
    return (
        f"{near} of {len(ratios)} within 5 %, median {statistics.median(ratios):.1%}, largest {max(ratios):.1%}.\n\n"
        f"{markdown(said, columns)}"
    )


def pivot(rows: Sequence[dict[str, Any]]) -> str:
    """Return predicted over measured of the last row of each case as a Markdown table, a line a model."""
    last = {(row["model"], row["plan"]): row for row in rows}
    plans = [plan for plan in PLANS if any(each == plan for _, each in last)]
    lines = []
    for model in MODELS:
        cells = {plan: last.get((model, plan), {}).get("ratio") for plan in plans}
        if any(cells.values()):
            lines.append({"model": model} | {plan: f"{cell:.3f}" if cell else "" for plan, cell in cells.items()})
    return markdown(lines, ["model", *plans])


def main() -> int:
    """Run every case asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--limit", type=float, default=0.05)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that planning, and running, may take")
    parser.add_argument("--table", type=Path, metavar="FILE", help="where a Markdown table goes")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.jsonl")
    parser.add_argument("--show", action="store_true", help="run nothing, print the table of what is in --output")
    args = parser.parse_args()
    if args.show:
        print(pivot([json.loads(line) for line in args.output.read_text(encoding="utf-8").splitlines()]))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"  # forks of a process that has started torch's thread pool hang
    import torch

    torch.set_num_threads(1)
    import_module("autopar.api.compiling")
    if set(args.models) - {"mlp", "unet"}:
        import_module("autopar.models.hf_tiny")
        import_module("transformers")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            for plan in args.plans:
                rows.append(run_case(name, plan, Path(folder), args.timeout))
                write(rows[-1], args.output)
    if args.table:
        args.table.write_text(table(rows), encoding="utf-8")
    return 0 if all(abs(row.get("ratio", 1.0) - 1) <= args.limit for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
