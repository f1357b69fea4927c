"""Whether the cost model sees every product: FLOPs of captured programs beside those that torch counts in eager mode.

    python -m benchmarks.products --models llama own:gnn

Small models of many kinds, as in `benchmarks.architectures`, forward and backward, without attention kernels, which
torch does not count on a CPU. `counted` is what `torch.utils.flop_counter` finds, which knows nothing inside custom
operators and counts the backward of a grouped convolution as if there were no groups; `priced` is what
`autopar.costs.operators.flops` finds in the program. One line of JSON a model, on stdout and in
benchmarks/results/products.jsonl; --summary tells those that differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.architectures import build, names
from benchmarks.forks import fork
from benchmarks.record import RESULTS, write

SAME = 0.01
"""Relative difference from which two counts are told to differ."""


def compare(name: str) -> dict[str, Any]:
    """Return both counts of a model, or why it was not captured."""
    from torch.utils.flop_counter import FlopCounterMode

    import autopar
    from autopar.api import captured_for
    from autopar.costs.operators import flops

    row: dict[str, Any] = {"benchmark": "products", "model": name}
    model, inputs = build(name)
    try:
        captured = captured_for(model, inputs, "fp32", training=True, with_backward=True)
    except autopar.AutoparError as error:
        return {**row, "refused": str(error).splitlines()[0]}
    with FlopCounterMode(display=False) as counter:
        out = model(**inputs)
        loss = out if hasattr(out, "backward") else out[0] if isinstance(out, tuple) else out["loss"]
        loss.backward()
    graph = captured.graph
    products = [op for op in graph.ops if not op.target.startswith("aten._scaled_dot_product")]
    counted = counter.get_total_flops()
    priced = sum(flops(op, [graph.meta(ref) for ref in op.refs]) for op in products)
    return {**row, "counted": counted, "priced": priced, "ratio": priced / counted if counted else None}


def _count(name: str, output: Path) -> None:
    write(compare(name), output)


def summary(path: Path) -> str:
    """Return how many models are counted alike, and the others with their ratio, of the last line of each."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = {line["model"]: line for line in lines}.values()
    rows = [line for line in last if "priced" in line]
    apart = [line for line in rows if abs(line["priced"] - line["counted"]) > SAME * max(line["counted"], 1)]
    told = [f"{line['model']}: priced {line['priced']:.4g}, counted {line['counted']:.4g}" for line in apart]
    return "\n".join([f"{len(rows) - len(apart)} of {len(rows)} models are counted alike", *told]) + "\n"


def main() -> int:
    """Compare the models asked for, each in a process of its own, and print what differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=None, help="default: all")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a model may take")
    parser.add_argument("--summary", action="store_true", help="of the lines there are; nothing is run")
    parser.add_argument("--output", type=Path, default=RESULTS / "products.jsonl")
    args = parser.parse_args()
    for name in [] if args.summary else args.models or names():
        error = fork([(_count, (name, args.output), {})], args.timeout)
        if error:
            sys.stderr.write(f"products: {name}: {error}\n")
    sys.stdout.write(summary(args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
