"""Training steps on one GPU, predicted and measured: plain PyTorch's, and those of the program that autopar makes.

    python -m benchmarks.single_gpu --measure                          # on a machine with a GPU
    python -m benchmarks.single_gpu --predict --cluster h200:1         # anywhere: what plans say
    python -m benchmarks.single_gpu --table                            # both, into docs/accuracy/single_gpu.md

Models of transformers train in bfloat16 (autocast, parameters and AdamW in float32) on random data. A step is forward,
backward and AdamW; several run in a row before the host waits for them, and of such runs the median counts. Memory is
what torch's allocator held at most, in forward and backward and in the whole step, and what the device had in use
(context and cached memory included). Of one more step, in which nothing is timed, the profiler keeps the seconds of the
kernels of each operator by the shapes that it was given. Every case runs in a process of its own, with a time limit.
Lines go to benchmarks/results/single_gpu.jsonl.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import record

OUTPUT = record.RESULTS / "single_gpu.jsonl"
_WARM_UP, _RUNS, _IN_A_ROW = 3, 5, 4
_KEPT = 90
"""Operators a case whose kernels' seconds are kept, those that take longest."""

_NO_DROPOUT = {"attn_pdrop": "0", "embd_pdrop": "0", "resid_pdrop": "0"}


@dataclass(frozen=True)
class Case:
    """A model of transformers and its batch."""

    kind: str
    batch: int
    seq: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)

    def build(self, device: str) -> tuple[Any, dict[str, Any]]:
        """Return the model in training mode and its arguments; on meta they have no values."""
        import torch

        from autopar.models import hf

        torch.manual_seed(0)
        model = hf.build(hf.load_config(self.kind, self.settings), device)
        specs = hf.inputs(model, self.batch, self.seq or None)
        if device == "meta":
            return model, {name: each.meta() for name, each in specs.items()}
        generator = torch.Generator().manual_seed(0)
        made = {name: each.random(generator).to(device) for name, each in specs.items()}
        return model, made | hf.plain_arguments(model)


CASES: Mapping[str, Case] = {
    "gpt2": Case("gpt2", 16, 1024, _NO_DROPOUT),
    "gpt2_few_tokens": Case("gpt2", 1, 128, _NO_DROPOUT),
    "llama_1b": Case(
        "llama", 4, 2048,
        {"hidden_size": "2048", "num_hidden_layers": "16", "num_attention_heads": "32", "num_key_value_heads": "8",
         "intermediate_size": "8192", "vocab_size": "128256", "max_position_embeddings": "2048"},
    ),
    "vit_large": Case(
        "vit", 64, 0,
        {"hidden_size": "1024", "num_hidden_layers": "24", "num_attention_heads": "16", "intermediate_size": "4096",
         "num_labels": "1000"},
    ),
    "bert_large": Case(
        "bert", 32, 512,
        {"hidden_size": "1024", "num_hidden_layers": "24", "num_attention_heads": "16", "intermediate_size": "4096",
         "hidden_dropout_prob": "0", "attention_probs_dropout_prob": "0"},
    ),
    "resnet50": Case("resnet", 128, 0, {"num_labels": "1000"}),
    "qwen3_moe": Case(
        "qwen3_moe", 8, 1024,
        {"hidden_size": "1024", "num_hidden_layers": "8", "num_attention_heads": "16", "num_key_value_heads": "4",
         "num_experts": "32", "num_experts_per_tok": "4", "moe_intermediate_size": "512",
         "vocab_size": "32000", "max_position_embeddings": "1024"},
    ),
    "t5_base": Case(
        "t5", 16, 512,
        {"d_model": "768", "d_ff": "3072", "num_layers": "12", "num_decoder_layers": "12", "num_heads": "12",
         "dropout_rate": "0"},
    ),
}  # fmt: skip

WAYS = ("plain", "autopar", "plain_compiled", "autopar_inductor")


def train(case: Case, way: str, device: str, plan: Any, profile: bool) -> dict[str, Any]:
    """Return what steps of one case take on this machine."""
    import torch

    model, inputs = case.build(device)
    step, whole, update = _steps(model, inputs, way, device, plan)
    gpu = device == "cuda"

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize()

    start = time.perf_counter()
    for _ in range(_WARM_UP):
        whole()
    wait()
    found: dict[str, Any] = {"first_s": time.perf_counter() - start}
    seconds = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        for _ in range(_IN_A_ROW):
            loss = whole()
        wait()
        seconds.append((time.perf_counter() - start) / _IN_A_ROW)
    found |= record.spread(seconds) | {"loss": float(loss)}
    apart = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        step()
        wait()
        apart.append(time.perf_counter() - start)
        update()
        wait()
    found["gradients_s"] = statistics.median(apart)
    if gpu:
        found["before_bytes"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        found["gradients_peak_bytes"] = torch.cuda.max_memory_allocated()
        update()
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        free, total = torch.cuda.mem_get_info()
        found |= {"reserved_bytes": torch.cuda.max_memory_reserved(), "used_bytes": total - free}
    if profile:
        found["operators"] = _profiled(whole)
    return found


def _steps(
    model: Any, inputs: Mapping[str, Any], way: str, device: str, plan: Any
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], None]]:
    """Return forward and backward, the whole step, and the optimizer's part of it, of one way to train the model."""
    import torch

    import autopar

    cast: Any = nullcontext()
    if way.startswith("autopar"):
        cluster = autopar.ClusterSpec.from_dict(plan.cluster)
        backend: Any = "inductor" if way.endswith("inductor") else "eager"
        model = autopar.compile(model, cluster, example_inputs=dict(inputs), plan=plan, backend=backend, device=device)
    else:
        cast = torch.autocast(device, torch.bfloat16)
        model = torch.compile(model) if way.endswith("compiled") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Any:
        with cast:
            output = model(**inputs)
        loss = output["loss"] if isinstance(output, dict) else output.loss
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def whole() -> Any:
        loss = step()
        update()
        return loss

    return step, whole, update


def _profiled(whole: Callable[[], Any]) -> list[list[Any]]:
    """Return operator, shapes, calls and kernels' seconds a step of what takes longest on the device."""
    import torch
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profile:
        whole()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    found = [
        [each.key, str(each.input_shapes), each.count, each.self_device_time_total * 1e-6]
        for each in profile.key_averages(group_by_input_shape=True)
        if each.self_device_time_total and str(each.device_type).endswith("CPU")
    ]
    found.sort(key=lambda each: -each[3])
    rest = [["(others)", "", sum(each[2] for each in found[_KEPT:]), sum(each[3] for each in found[_KEPT:])]]
    return found[:_KEPT] + (rest if found[_KEPT:] else [])


def planned(case: Case, cluster: Any) -> Any:
    """Return the plan of a case on a cluster of one device."""
    import autopar

    model, inputs = case.build("meta")
    return autopar.plan(model, cluster, example_inputs=inputs, precision="bf16", optimizer="adamw")


def predicted(case: Case, cluster: Any) -> dict[str, Any]:
    """Return what a plan says of a case on a cluster of one device, and the seconds of each kind of operator."""
    plan = planned(case, cluster)
    estimates = plan.estimates
    operators: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for each in plan.decisions.operators.values():
        kind = operators[each.target]
        kind[0] += each.instances
        kind[1] += each.predicted_s * each.instances
    return {
        "predicted_s": estimates.step_time_s,
        "optimizer_s": estimates.breakdown.optimizer_s,
        "predicted_bytes": estimates.peak_memory_bytes,
        "reserved": estimates.memory.reserved,
        "operators": {name: each for name, each in operators.items() if each[1]},
    }


def measure(args: argparse.Namespace) -> None:
    """Measure all cases in all ways asked for, each in a process of its own; the next ones get ready meanwhile."""
    with ThreadPoolExecutor(args.ready) as pool, tempfile.NamedTemporaryFile() as turns:
        started = [
            (f"{name} {way}", pool.submit(_started, name, way, turns.name, args))
            for name in args.cases
            for way in args.ways
        ]
        for case, each in started:
            found = each.result()
            if isinstance(found, str):
                sys.stderr.write(f"single_gpu: {case}: {found}\n")
            else:
                record.write(found, args.output)


def _started(name: str, way: str, turns: str, args: argparse.Namespace) -> dict[str, Any] | str:
    words = [sys.executable, "-m", "benchmarks.single_gpu", "--alone", name, way, turns, "--on", args.on]
    words += ["--cluster", args.cluster, *(["--no-profile"] if args.no_profile else [])]
    try:
        done = subprocess.run(words, cwd=record.ROOT, capture_output=True, text=True, timeout=args.timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"not done in {args.timeout:.0f} s"
    if done.returncode:
        return done.stderr[-1500:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _alone(name: str, way: str, turns: str, args: argparse.Namespace) -> None:
    import torch

    case = CASES[name]
    plan = None
    if way.startswith("autopar"):
        plan = planned(case, args.cluster)
    else:
        case.build("meta")
    with Path(turns).open(encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = train(case, way, args.on, plan, not args.no_profile)
    device = torch.cuda.get_device_name() if args.on == "cuda" else "cpu"
    line = {"benchmark": "single_gpu", "case": name, "way": way, "device": device, **found}
    sys.stdout.write(json.dumps(line) + "\n")


def predict(args: argparse.Namespace) -> None:
    """Write what plans say of the cases beside what was measured."""
    cluster = args.cluster
    for name in args.cases:
        line = {"benchmark": "single_gpu", "case": name, "way": "predicted", "device": cluster}
        record.write(line | predicted(CASES[name], cluster), args.output)


def table(path: Path, cluster: str, name: str) -> list[dict[str, Any]]:
    """Return rows of what was measured on a device of a name beside what plans said of it: the first time and the last.

    Predicted the first time is what nothing that was measured there had a part in.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = []
    for case in CASES:
        mine = [line for line in lines if line["case"] == case]
        said = [line for line in mine if line["way"] == "predicted" and line["device"] == cluster]
        took = {line["way"]: line for line in mine if name in line["device"]}
        if not said or "autopar" not in took:
            continue
        ours, bytes_ = took["autopar"], said[-1]["predicted_bytes"] - said[-1]["reserved"]
        rows.append(
            {
                "model": case,
                "PyTorch, s": _seconds(took.get("plain")),
                "autopar, s": _seconds(ours),
                "predicted blind": f"{said[0]['predicted_s']:.4f}",
                "error": f"{said[0]['predicted_s'] / ours['measured_s'] - 1:+.1%}",
                "predicted now": f"{said[-1]['predicted_s']:.4f}",
                "error now": f"{said[-1]['predicted_s'] / ours['measured_s'] - 1:+.1%}",
                "peak, GiB": f"{ours['gradients_peak_bytes'] / 2**30:.2f}",
                "predicted": f"{bytes_ / 2**30:.2f}",
                "error of memory": f"{bytes_ / ours['gradients_peak_bytes'] - 1:+.1%}",
            }
        )
    return rows


def _seconds(line: Mapping[str, Any] | None) -> str:
    return f"{line['measured_s']:.4f}" if line else ""


def main() -> int:
    """Do what was asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["plain", "autopar"])
    parser.add_argument("--cluster", default="h100-sxm-80gb:1")
    parser.add_argument("--on", default="cuda", help="torch's device")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--card", default="NVIDIA H200", help="what the device of the table calls itself")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a case may take, its turn awaited")
    parser.add_argument("--ready", type=int, default=3, help="processes, of which one measures and others get ready")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    if args.alone:
        name, way, turns = args.alone
        _alone(name, way, turns, args)
    if args.measure:
        measure(args)
    if args.predict:
        predict(args)
    if args.table:
        rows = table(args.output, args.cluster, args.card)
        record.renew({"single GPU": record.markdown(rows, list(rows[0]))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
