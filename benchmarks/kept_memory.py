"""What it is worth that CPU ranks keep the memory they free, and how much more of it they hold for that.

    python -m benchmarks.kept_memory --scenarios gpt_large_vocabulary deep_square --models gpt2 llama

One rank trains each model alone, in a process with what it frees kept (`autopar/runtime/heap.py`) and in one with
malloc as glibc has it, by turns. Of each: the median seconds of a step (forward, backward, AdamW), the pages a step got
anew from the system, and the most memory that the process had. One line of JSON a model: medians over rounds, and the
median of the rounds' ratios. Lines go to stdout and to benchmarks/results/kept_memory.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.overhead import MODELS, Example
from benchmarks.record import RESULTS, ROOT, write
from benchmarks.testbed.scenarios import SCENARIOS

_WARM_UP = 4


def built(name: str) -> Example:
    """Return the model and the batch of a scenario of the testbed, or of a model of `benchmarks/overhead.py`."""
    return SCENARIOS[name].build() if name in SCENARIOS else MODELS[name]()


def measured(name: str, steps: int) -> dict[str, float]:
    """Return what steps of the model take in this process: seconds, pages of the system, and most bytes resident."""
    import torch

    import autopar

    torch.set_num_threads(1)
    model, batch = built(name)
    compiled = autopar.compile(model, "cpu:1", example_inputs=batch, optimizer="adamw")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    seconds, pages = [], []
    for _ in range(_WARM_UP + steps):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        made: Any = compiled(**batch) if isinstance(batch, dict) else compiled(*batch)
        (made if isinstance(made, torch.Tensor) else made.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "step_s": statistics.median(seconds[_WARM_UP:]),
        "pages": statistics.median(pages[_WARM_UP:]),
        "resident_bytes": most,
    }


def _in_process(name: str, steps: int, *, keep: bool) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kept_memory", "--alone", name, "--steps", str(steps)],
        cwd=ROOT,
        env={**os.environ, "AUTOPAR_KEEP_MEMORY": "1" if keep else "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(name: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return the line of one model."""
    pairs = [[_in_process(name, steps, keep=keep) for keep in (True, False)] for _ in range(rounds)]
    made: dict[str, Any] = {"benchmark": "kept_memory", "model": name, "rounds": rounds, "steps": steps}
    for key in ("step_s", "pages", "resident_bytes"):
        for place, how in enumerate(("kept", "left")):
            made[f"{how}_{key}"] = statistics.median(pair[place][key] for pair in pairs)
    for key in ("step_s", "resident_bytes"):
        made[f"ratio_of_{key}"] = round(statistics.median(kept[key] / left[key] for kept, left in pairs), 4)
    return made


def main() -> int:
    """Measure what was asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", nargs="*", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9, help="timed steps a process")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULTS / "kept_memory.jsonl")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measured(args.alone, args.steps)))
        return 0
    for name in (*args.scenarios, *args.models):
        write(row(name, args.rounds, args.steps), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
