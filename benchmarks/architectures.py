"""Which architectures run under which plans, with the numbers of one device: small models of many kinds on gloo ranks.

    python -m benchmarks.architectures --models llama own:gnn timm:resnet18 --plans tp 1f1b

Models are those of `autopar.models.hf_tiny`, `own:NAME` of `benchmarks.own_models`, those of other libraries that are
installed (`benchmarks.other_models`: `timm:NAME`, `hf:TYPE` and others), and `random:SEED`, drawn from what models do
(`benchmarks.random_models`). `NAME@float64` computes in float64, which tells rounding from wrong numbers. Compared with
eager as `benchmarks.equivalence` does, by its limits, but for the output of eval(). A case is `ok`, `wrong` (beyond a
limit), `refused` (an error of autopar's own, whose text is kept) or `failed`. A model is built and captured once, in a
process of its own; ranks are forks of it. One line of JSON a case, on stdout and in
benchmarks/results/architectures.jsonl; cases that the file has are left out, unless --again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from benchmarks.cases import Fix, cluster_of
from benchmarks.equivalence import LIMITS, of_all_stages, results, unequal_replicas, whole
from benchmarks.equivalence import differences as _differences
from benchmarks.forks import fork, free_port, variables
from benchmarks.record import RESULTS, markdown, write

BATCH = 12
"""Samples of a step; micro-batches of 4 are 3, no multiple of the stages."""

LAYERS = 4

_HALF = 2.0**-7
"""Limit of models that compute in 16 bits somewhere: a step of bfloat16, as sums in another order round elsewhere."""

PLANS: dict[str, tuple[str, Fix]] = {
    "free": ("2", {}),
    "dp": ("2", {"dp_replicate": 2}),
    "tp": ("2", {"tp": 2}),
    "zero": ("2", {"dp_shard": 2, "zero": 3}),
    "recompute": ("2", {"dp_replicate": 2, "recompute": "full"}),
    "micro": ("2", {"dp_replicate": 2, "microbatch": 2}),
    "1f1b": ("2", {"pp": 2, "schedule": "1f1b", "microbatch": 4}),
    "gpipe": ("2", {"pp": 2, "schedule": "gpipe", "microbatch": 4}),
    "interleaved": ("2", {"pp": 2, "schedule": "interleaved_1f1b", "interleave": 2, "microbatch": 4}),
    "zb_h1": ("2", {"pp": 2, "schedule": "zb_h1", "microbatch": 4}),
    "zbv": ("2", {"pp": 2, "schedule": "zbv", "interleave": 2, "microbatch": 4}),
    "pp-tp": ("4", {"pp": 2, "tp": 2, "microbatch": 4}),
    "ep": ("2", {"ep": 2}),
    "ep-zero": ("4", {"ep": 2, "dp_shard": 2, "zero": 3, "microbatch": 1}),
}
"""Mesh and what is fixed."""

_LAYER_SETTINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt2", "gptj", "bloom"), ("n_layer",)),
    **dict.fromkeys(("mpt", "distilbert"), ("n_layers",)),
    "t5": ("num_layers", "num_decoder_layers"),
    **dict.fromkeys(("whisper", "bart", "mbart", "pegasus"), ("encoder_layers", "decoder_layers")),
    **dict.fromkeys(("resnet", "swin", "convnext", "segformer", "mobilenet_v2", "clip", "siglip"), ()),
}


_EXACT = "@float64"
"""What the name of a model ends with that is to compute in float64: differences of rounding are gone, others stay."""

_MARK = "<!-- benchmarks.architectures -->"
"""Where the table begins in a document; what stands before stays."""


def names() -> list[str]:
    """Return all models there are."""
    from autopar.models.hf_tiny import tiny_names
    from benchmarks.other_models import installed
    from benchmarks.own_models import FACTORIES

    return [*tiny_names(), *(f"own:{each}" for each in FACTORIES), *installed()]


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a model in training mode and its keyword arguments, equal on every rank."""
    exact, name = name.endswith(_EXACT), name.removesuffix(_EXACT)
    model, inputs = _build(name)
    if exact:
        model = model.double()
        inputs = {key: each.double() if _is_real(each) else each for key, each in inputs.items()}
    return model, inputs


def _is_real(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and value.is_floating_point()


def _build(name: str) -> tuple[Any, dict[str, Any]]:
    kind, _, rest = name.partition(":")
    if kind == "own":
        from benchmarks.own_models import example

        return example(rest, BATCH)
    if kind == "random":
        from benchmarks.random_models import example as drawn

        return drawn(int(rest), BATCH)
    if rest:
        from benchmarks import other_models

        return other_models.example(kind, rest, BATCH)
    from autopar.models.hf_tiny import tiny

    stacks = _LAYER_SETTINGS.get(name, ("num_hidden_layers",))
    layers: dict[str, Any] = {key: LAYERS // len(stacks) for key in stacks}
    return tiny(name, batch=BATCH, **layers)


_CAPTURED: dict[tuple[Any, ...], Any] = {}
"""Programs of this process's one model, by how they were captured; forks have them, too."""


def _capture(model: Any, example: Any, precision: str, **how: bool) -> Any:
    from autopar.api import captured_for

    key = (precision, *sorted(how.items()))
    if key not in _CAPTURED:
        _CAPTURED[key] = captured_for(model, example, precision, **how)
    return _CAPTURED[key]


def _captured_once() -> None:
    """Let every program be captured once in this process and its forks."""
    import autopar.api.compiling as compiling

    compiling.captured_for = _capture  # type: ignore[assignment, attr-defined]


def _reference(name: str, out: Path) -> None:
    import torch

    torch.save(results(*build(name), evaluate=False), out)


def _make_plan(name: str, plan: str, out: Path) -> None:
    from autopar.api import plan_captured
    from autopar.options import PlanOptions
    from autopar.progress import Silent

    mesh, fix = PLANS[plan]
    model, inputs = build(name)
    options = PlanOptions.parse(fix=fix, time_limit=15.0, gap=0.1)
    captured = _capture(model, inputs, "fp32", training=True, with_backward=True)
    made = plan_captured(captured, name, cluster_of(mesh), options, Silent())
    made.save(out)


def _rank_main(name: str, plan: Path, wanted: Path, out: Path) -> None:
    import torch
    import torch.distributed as dist

    import autopar

    dist.init_process_group("gloo")
    model, inputs = build(name)
    loaded = autopar.Plan.load(plan)
    compiled = autopar.compile(model, autopar.ClusterSpec.from_dict(loaded.cluster), example_inputs=inputs, plan=loaded)
    found = results(compiled, inputs, evaluate=False)
    unequal = unequal_replicas(found)
    gathered = whole(found)
    if loaded.decisions.stages:
        gathered = of_all_stages(gathered)
    if dist.get_rank() == 0:
        apart = _differences(gathered, torch.load(wanted))
        out.write_text(json.dumps({**apart, "unequal_replicas": unequal}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _model_main(name: str, plans: Sequence[str], output: Path | None, timeout_s: float) -> None:
    """Run the cases of a model, one after another."""
    import torch

    torch.set_num_threads(1)
    _captured_once()
    row: dict[str, Any] = {"benchmark": "architectures", "model": name}
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.pt"
        try:
            model, inputs = build(name)
            captured = _capture(model, inputs, "fp32", training=True, with_backward=True)
            made = {meta.dtype for op in captured.graph.ops for meta in op.outputs if meta is not None}
            if made & {"bfloat16", "float16"}:
                row["rounding"] = _HALF
        except Exception as raised:  # noqa: BLE001  a result here
            kind = type(raised)
            error = f"{kind.__module__}.{kind.__qualname__}: {raised}"
        else:
            error = fork([(_reference, (name, wanted), {})], timeout_s)
        for plan in plans:
            start = time.perf_counter()
            found = _outcome(error) if error else _run(name, plan, wanted, Path(folder), timeout_s)
            seconds = round(time.perf_counter() - start, 1)
            ended = {**row, "plan": plan, **found, "seconds": seconds}
            write({**ended, "outcome": "wrong"} if "loss" in ended and _beyond(ended) else ended, output)


def _run(name: str, plan: str, wanted: Path, folder: Path, timeout_s: float) -> dict[str, Any]:
    from autopar.ir.plan import Plan

    planned, told = folder / f"{plan}.json", folder / f"{plan}.result.json"
    error = fork([(_make_plan, (name, plan, planned), {})], timeout_s)
    if error:
        return {"phase": "plan", **_outcome(error)}
    made = Plan.load(planned)
    decided = made.decisions
    row: dict[str, Any] = {"axes": str(decided.mesh), "stages": len(decided.stages)}
    without = sorted({each.text.partition(" ")[0] for each in made.warnings if each.code == "no-rule"})
    if without:
        row["without_rule"] = without
    ranks = int(PLANS[plan][0])
    port = str(free_port())
    work = [(_rank_main, (name, planned, wanted, told), variables(rank, ranks, port)) for rank in range(ranks)]
    error = fork(work, timeout_s)
    if error:
        return {**row, "phase": "run", **_outcome(error)}
    found = json.loads(told.read_text(encoding="utf-8"))
    return {**row, "outcome": "ok", **found}


def _outcome(error: str) -> dict[str, str]:
    """Return how a case ended that raised: refused if the last line of a traceback names an error of autopar's."""
    import autopar.errors

    start = max(error.rfind("\nautopar."), 0)
    last = error[start:].strip()
    kind = last.partition(":")[0].rpartition(".")[2]
    known = getattr(autopar.errors, kind, None)
    refused = last.startswith("autopar.") and isinstance(known, type) and issubclass(known, autopar.errors.AutoparError)
    return {"outcome": "refused", "error": last[:1500]} if refused else {"outcome": "failed", "error": error[-2500:]}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line a model: how each plan ended, and why; of several rows of a case, the last counts."""
    last = {(row["model"], row["plan"]): row for row in rows}
    lines: dict[str, dict[str, Any]] = {}
    why: dict[str, list[str]] = {}
    for (model, plan), row in last.items():
        lines.setdefault(model, {"model": model})[plan] = row["outcome"]
        if row["outcome"] != "ok":
            text = row["error"].partition(": ")[2] if row["outcome"] == "refused" else f"{row['outcome']}: {_told(row)}"
            why.setdefault(f"{model}: {' '.join(text.split())[:300]}", []).append(plan)
    ended = Counter(row["outcome"] for row in last.values())
    counts = ", ".join(f"{count} {outcome}" for outcome, count in ended.most_common())
    plans = [plan for plan in PLANS if any(plan in line for line in lines.values())]
    reasons = "".join(f"- {text} ({', '.join(found)})\n" for text, found in why.items())
    body = markdown(list(lines.values()), ["model", *plans])
    return f"{len(lines)} models, {len(last)} cases: {counts}.\n\n{body}\n{reasons}"


def _told(row: dict[str, Any]) -> str:
    """Return what is wrong with a case that ran to a wrong end."""
    if "error" in row:
        return str(row["error"]).strip().rpartition("\n")[2]
    return ", ".join(_beyond(row))


def _beyond(row: dict[str, Any]) -> list[str]:
    """Return what of a case's differences is beyond its limits."""
    least = row.get("rounding", 0.0)
    found = [f"{kind} {row[kind]:.2g}" for kind, limit in LIMITS.items() if row[kind] > max(limit, least)]
    return [*found, *(["replicas differ"] if row["unequal_replicas"] else [])]


def _sampled(name: str, plans: Sequence[str], count: int | None) -> list[str]:
    """Return so many of the plans as a model's name draws, all of them if nobody says how many."""
    return sorted(plans, key=lambda plan: crc32(f"{name} {plan}".encode()))[:count] if count else list(plans)


def main() -> int:
    """Run every case asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", help="all by default")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that planning, and running, may take")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no model is begun after as many")
    parser.add_argument("--sample", type=int, metavar="N", help="of the plans, so many for each model, by its name")
    parser.add_argument("--again", action="store_true", help="run cases that the output has, too")
    parser.add_argument("--output", type=Path, default=RESULTS / "architectures.jsonl")
    parser.add_argument("--table", type=Path, metavar="FILE", help="document that ends with the table of the output")
    args = parser.parse_args()
    lines = args.output.read_text(encoding="utf-8").splitlines() if args.output.exists() else []
    rows = [json.loads(line) for line in lines]
    if args.table:
        old = args.table.read_text(encoding="utf-8").partition(_MARK)[0] if args.table.exists() else ""
        args.table.write_text(f"{old}{_MARK}\n\n{table(rows)}", encoding="utf-8")
        return 0
    done = set() if args.again else {(row["model"], row["plan"]) for row in rows}
    start = time.monotonic()
    import autopar.api.compiling  # noqa: F401  forks find it imported

    for name in args.models or names():
        drawn = sorted(args.plans, key=lambda plan: crc32(f"{name} {plan}".encode()))[: args.sample]
        plans = [plan for plan in drawn if (name, plan) not in done]
        if not plans or time.monotonic() - start > args.seconds:
            continue
        error = fork([(_model_main, (name, plans, args.output, args.timeout), {})], args.timeout * 2 * len(plans))
        if error:
            sys.stderr.write(f"{name}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
