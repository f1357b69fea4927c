"""Scans over a sequence on one core: seconds and bytes held that are priced beside those of transformers' functions.

    python -m benchmarks.scans
    python -m benchmarks.scans --published    # forward on GPUs, as others measured it, beside its price

Forward and backward of `autopar_ops::scan` at fifteen shapes, three of each kind, in memory that the process keeps, as
emitted programs have it. Prices are of the catalogue's `cpu`. What backward takes without `own_scans._PicksOnce` is
measured, too, once. One line of JSON a shape, on stdout and in benchmarks/results/scans.jsonl; medians of five runs.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.record import RESULTS, ROOT, markdown, write

Case = tuple[str, str, dict[str, tuple[int, ...]], dict[str, Any]]
"""Kind, function, shapes by argument, settings."""

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4294967295", "MALLOC_TRIM_THRESHOLD_": "4294967295", "MALLOC_TOP_PAD_": "1073741824",
}  # fmt: skip
"""What glibc is told, so that nothing returns to the system between two runs."""

DATA = ROOT / "benchmarks" / "data"
NAMES = ("measured", "priced")

_MODELS = "transformers.models"


def cases() -> Iterator[tuple[str, Case]]:
    """Yield every shape by a name."""
    delta = f"{_MODELS}.qwen3_next.modeling_qwen3_next:torch_chunk_gated_delta_rule"
    for samples, steps, groups, each, keys, values in (
        (2, 512, 4, 2, 64, 64),
        (1, 1024, 8, 2, 128, 128),
        (4, 256, 8, 1, 32, 64),
    ):
        heads = groups * each
        shapes: dict[str, tuple[int, ...]] = {
            "query": (samples, steps, groups, keys),
            "key": (samples, steps, groups, keys),
            "value": (samples, steps, heads, values),
            "g": (samples, steps, heads),
            "beta": (samples, steps, heads),
        }
        yield (
            f"gated delta rule {samples}x{steps}x{heads}x{values}",
            ("gated_delta_rule", delta, shapes, {"use_qk_l2norm_in_kernel": True}),
        )
    kimi = f"{_MODELS}.kimi_linear.modeling_kimi_linear:chunk_kimi_delta_attention"
    for samples, steps, heads, keys, values in ((1, 512, 4, 64, 64), (1, 256, 8, 128, 128), (2, 256, 8, 32, 64)):
        shapes = {
            "query": (samples, steps, heads, keys),
            "key": (samples, steps, heads, keys),
            "value": (samples, steps, heads, values),
            "g": (samples, steps, heads, keys),
            "beta": (samples, steps, heads),
        }
        yield (
            f"kimi delta rule {samples}x{steps}x{heads}x{values}",
            ("kimi_delta_rule", kimi, shapes, {"use_qk_l2norm_in_kernel": True}),
        )
    selective = f"{_MODELS}.mamba.modeling_mamba:mamba_selective_scan"
    for samples, features, steps, width in ((2, 256, 256, 16), (1, 512, 1024, 16), (4, 128, 128, 64)):
        flow, of_state = (samples, features, steps), (samples, width, steps)
        flows: dict[str, tuple[int, ...]] = {"hidden_states": flow, "dt": flow, "A": (features, width), "z": flow}
        rest: dict[str, tuple[int, ...]] = {"B": of_state, "C": of_state, "D": (features,), "delta_bias": (features,)}
        yield (
            f"selective scan {samples}x{features}x{steps}x{width}",
            ("selective_scan", selective, flows | rest, {"delta_softplus": True}),
        )
    chunks = f"{_MODELS}.mamba2.modeling_mamba2:mamba2_chunk_scan"
    for samples, steps, groups, each, features, width, chunk in (
        (2, 512, 1, 8, 64, 64, 64),
        (1, 1024, 2, 8, 64, 128, 256),
        (4, 256, 8, 1, 32, 16, 32),
    ):
        heads = groups * each
        state = (samples, steps, groups, width)
        tokens: dict[str, tuple[int, ...]] = {
            "hidden_states": (samples, steps, heads, features), "dt": (samples, steps, heads), "A": (heads,)
        }  # fmt: skip
        beside: dict[str, tuple[int, ...]] = {"B": state, "C": state, "D": (heads,), "dt_bias": (heads,)}
        how = {"chunk_size": chunk, "dt_softplus": True, "dt_limit": (0.0, float("inf"))}
        yield f"chunk scan {samples}x{steps}x{heads}x{features}", ("chunk_scan", chunks, tokens | beside, how)
    convolution = f"{_MODELS}.mamba.modeling_mamba:causal_conv1d_fn"
    for samples, features, steps, width in ((2, 256, 512, 4), (1, 1024, 2048, 4), (4, 512, 256, 4)):
        read: dict[str, tuple[int, ...]] = {
            "hidden_states": (samples, features, steps), "weight": (features, width), "bias": (features,)
        }  # fmt: skip
        yield (
            f"causal convolution {samples}x{features}x{steps}",
            ("causal_convolution", convolution, read, {"activation": "silu"}),
        )


def compare(case: Case, device: Any) -> dict[str, Any]:
    """Return what a scan takes and holds forward and backward, measured and priced."""
    import torch

    from autopar import own_scans
    from autopar.costs.scans import scan_bytes, scan_seconds
    from autopar.ir.graph import Op
    from autopar.ir.scan import ScanCall

    kind, function, shapes, settings = case
    generator = torch.Generator().manual_seed(0)
    read = [
        (-1 if name in {"A", "g"} else 1) * torch.rand(shape, generator=generator) for name, shape in shapes.items()
    ]
    ranks = tuple(map(len, shapes.values()))
    call = ScanCall(kind, function, tuple(shapes), ranks, (), settings, "float32").text
    ops = torch.ops.autopar_ops
    out = ops.scan(read, call)
    grad = torch.rand(out.shape, generator=generator)
    row: dict[str, Any] = {}
    ways = {"forward": lambda: ops.scan(read, call), "backward": lambda: ops.scan_backward(grad, read, call)}
    for name, run in ways.items():
        backward = name == "backward"
        target = f"autopar_ops.scan{'_backward' if backward else ''}.default"
        op = Op(name="scan", kind="call", target=target, args=((), call), outputs=())
        ins = [[tuple(out.shape)] * backward + [tuple(each.shape) for each in read]]
        made = sum(each.nbytes for each in read) if backward else out.nbytes
        row[name] = {
            "measured_s": _median(run),
            "priced_s": float(scan_seconds(op, ins, "float32", device)[0]),
            "measured_bytes": _peak(run) - made,
            "priced_bytes": float(scan_bytes(op, ins, "float32", device)[0]),
        }
    with patch.object(own_scans, "_PicksOnce", nullcontext):
        row["backward"]["picked_one_by_one_s"] = _median(ways["backward"], 1)
    return row


def published(path: Path = DATA / "scan_kernels.csv") -> list[dict[str, Any]]:
    """Return what others measured of flash-linear-attention's gated delta rule, beside its price."""
    from autopar.costs.scans import scan_seconds
    from autopar.ir.graph import Op
    from autopar.ir.scan import ScanCall
    from cost_models.device import catalogued_device

    found = []
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        samples, steps, keys, values, dim = (
            int(row[name]) for name in ("batch", "seq", "key_heads", "value_heads", "head_dim")
        )
        key, value = (samples, steps, keys, dim), (samples, steps, values, dim)
        shapes = {"q": key, "k": key, "v": value, "g": value[:3], "beta": value[:3]}
        ranks = tuple(map(len, shapes.values()))
        call = ScanCall("gated_delta_rule", "fla:chunk_gated_delta_rule", tuple(shapes), ranks, (), {}, row["dtype"])
        op = Op(name="scan", kind="call", target="autopar_ops.scan.default", args=((), call.text), outputs=())
        priced = float(scan_seconds(op, [[*shapes.values()]], row["dtype"], catalogued_device(row["device"]))[0])
        measured = float(row["forward_ms"]) / 1e3
        found.append({**row, "measured_s": measured, "priced_s": priced, "error": priced / measured - 1})
    return found


def _median(run: Callable[[], Any], times: int = 5) -> float:
    run()
    took = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _peak(run: Callable[[], Any]) -> int:
    """Return the most bytes that torch's allocator had given out during a run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = most = 0
    for each in sorted(events, key=lambda each: each.start_ns()):
        held += each.nbytes()
        most = max(most, held)
    return most


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all shapes on one thread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", help="whose names begin so; all")
    parser.add_argument("--output", type=Path, default=RESULTS / "scans.jsonl")
    parser.add_argument("--published", action="store_true", help="price published kernels, and measure nothing")
    args = parser.parse_args(arguments)
    if args.published:
        columns = ("device", "batch", "seq", "key_heads", "value_heads", "dtype")
        told = [
            {**{name: row[name] for name in columns}, **{f"{name} (ms)": row[f"{name}_s"] * 1e3 for name in NAMES}}
            | {"error": f"{row['error']:+.0%}"}
            for row in published()
        ]
        sys.stdout.write(markdown(told, [*columns, *(f"{name} (ms)" for name in NAMES), "error"]))
        return 0
    if any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):
        again = [sys.executable, "-m", "benchmarks.scans", *sys.argv[1:]]
        return subprocess.run(again, env={**os.environ, **KEEP_MEMORY}, check=False).returncode
    import torch

    from cost_models.device import catalogued_device

    torch.set_num_threads(1)
    device = catalogued_device("cpu")
    for name, case in cases():
        if args.kinds and not name.startswith(tuple(args.kinds)):
            continue
        write({"benchmark": "scans", "case": name, **compare(case, device)}, args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
