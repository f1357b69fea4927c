"""What the generated program costs on one rank, where there is nothing to gain: its step beside plain eager's.

    python -m benchmarks.overhead --models mlp gpt resnet llama

Two copies of a model with equal values train side by side in one process, a step of one, a step of the other (which
comes first alternates): forward, backward and AdamW. Kept are the median of the paired ratios of their seconds, and of
each the most bytes that torch's CPU allocator held in forward and backward beyond what it held before (the memory
events of torch.profiler, in a step apart from the timed ones). One line of JSON a model, on stdout and in
benchmarks/results/overhead.jsonl.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import RESULTS, write
from benchmarks.testbed.scenarios import Scenario

Example = tuple[nn.Module, tuple[Tensor, ...] | dict[str, Any]]


def _scenario(**sizes: int) -> Callable[[], Example]:
    return lambda: Scenario(**sizes).build()


def _tiny(name: str, **settings: Any) -> Callable[[], Example]:
    def build() -> Example:
        from autopar.models.hf_tiny import tiny

        return tiny(name, **settings)

    return build


MODELS: dict[str, Callable[[], Example]] = {
    "mlp": _scenario(width=512, depth=6, batch=512),
    "gpt": _scenario(width=256, depth=4, batch=8, seq=128, vocab=4096),
    "llama": _tiny("llama", hidden_size=256, intermediate_size=512, head_dim=32, vocab_size=1024),
    "gpt2": _tiny("gpt2", n_embd=256, vocab_size=1024),
    "bert": _tiny("bert", hidden_size=256, intermediate_size=512, vocab_size=1024),
    "vit": _tiny("vit", hidden_size=256, intermediate_size=512),
    "resnet": _tiny("resnet", embedding_size=32),
    "mixtral": _tiny("mixtral", hidden_size=256, intermediate_size=256, head_dim=32),
}
"""Small enough to be quick, large enough that a step is milliseconds of computation."""


class Trainer:
    """One copy of a model and its optimizer."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...] | Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def gradients(self) -> float:
        """Run forward and backward and return the loss."""
        given = self.inputs
        output = self.model(**given) if isinstance(given, Mapping) else self.model(*given)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        return loss.item()

    def update(self) -> None:
        """Take the optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> float:
        """Train one step and return the loss."""
        loss = self.gradients()
        self.update()
        return loss

    def seconds(self) -> float:
        """Return the seconds of one step."""
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def peak_bytes(trainer: Trainer) -> int:
    """Return the most bytes allocated during forward and backward beyond those before; the optimizer's are its own.

    The allocator's own rounding and what libraries allocate by themselves are not counted.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer.gradients()
    trainer.update()
    events = profile.profiler.kineto_results.events()
    moves = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    held = peak = 0
    for _, change in moves:
        held += change
        peak = max(peak, held)
    return peak


def measure(name: str, warmup: int, steps: int) -> dict[str, Any]:
    """Return the row of one model."""
    import autopar

    model, inputs = MODELS[name]()
    planned = autopar.compile(copy.deepcopy(model), "cpu:1", example_inputs=inputs)
    eager, ours = Trainer(model, inputs), Trainer(planned, inputs)
    for _ in range(warmup):
        losses = eager.step(), ours.step()
    pairs = []
    for number in range(steps):
        if number % 2:
            second = ours.seconds()
            pairs.append((eager.seconds(), second))
        else:
            first = eager.seconds()
            pairs.append((first, ours.seconds()))
    eager_peak, our_peak = peak_bytes(eager), peak_bytes(ours)
    return {
        "benchmark": "overhead",
        "model": name,
        "eager_s": statistics.median(pair[0] for pair in pairs),
        "measured_s": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(ours / eagers for eagers, ours in pairs),
        "repeats": steps,
        "eager_peak_bytes": eager_peak,
        "peak_bytes": our_peak,
        "peak_ratio": our_peak / eager_peak,
        "losses": losses,
    }


def main() -> int:
    """Measure every model asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--warmup", type=int, default=5, help="untimed steps of each")
    parser.add_argument("--steps", type=int, default=40, help="timed pairs of steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "overhead.jsonl")
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        parser.error("this measures one rank; run it without torchrun")
    torch.set_num_threads(args.threads)
    for name in args.models:
        write({**measure(name, args.warmup, args.steps), "threads": args.threads}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
