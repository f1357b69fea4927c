"""How long one training step of one scenario takes under one strategy.

    python benchmarks/testbed/netrun.py -- python -m benchmarks.testbed.step --scenario gpt_balanced --strategy tp

Every rank runs this under the variables of torchrun, on gloo with one thread. A step is forward, backward and AdamW
(torch's own, lr 1e-3, the same for all strategies), from a barrier until the last rank is done. Rank 0 prints one line
of JSON: the seconds of each timed step, and the global loss of each step, warm-up included, by which strategies that
compute different things give themselves away.

Strategies: `ddp`, `fsdp2` (fully_shard on each layer and on the whole), `tp` (Megatron's column and row split, the head
and its loss split by vocabulary, the embedding too where that is cheaper than updating all of it), `pipeline` (1F1B of
torch.distributed.pipelining over equal numbers of layers) and `autopar` or `flat` (the plan of `--plan`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.testbed.families import FAMILIES
from benchmarks.testbed.families import Program as Family
from benchmarks.testbed.scenarios import SCENARIOS, Gpt, Scenario

PROGRAMS: dict[str, Scenario | Family] = {**SCENARIOS, **FAMILIES}


@dataclass
class Program:
    """A model made parallel, and the arguments that this rank calls it with."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    share: Literal["whole", "mean", "sum"] = "whole"
    """What a rank's loss is: the global one, or one of which that is the mean or the sum over ranks."""

    run: Callable[[], Tensor] | None = None
    """What runs forward and backward where the user's loop does not."""

    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


def ddp(scenario: Scenario | Family, _: argparse.Namespace) -> Program:
    """Return the program under DistributedDataParallel."""
    model, batch = scenario.build()
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Program(parallel, _own_samples(batch), "mean")


def fsdp2(scenario: Scenario | Family, _: argparse.Namespace) -> Program:
    """Return the program with its parameters sharded layer by layer."""
    from torch.distributed.fsdp import fully_shard

    model, batch = scenario.build()
    mesh = _mesh("dp_shard")
    for stack in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        for layer in stack:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Program(model, _own_samples(batch), "mean")


def tp(scenario: Scenario, _: argparse.Namespace) -> Program:
    """Return the program as an expert splits it by hand."""
    from torch.distributed.tensor.parallel import parallelize_module

    model, batch = scenario.build()
    if isinstance(model, Gpt):
        parallelize_module(model, _mesh("tp"), _gpt_splits(model, scenario))
        return Program(model, batch, context=_loss_parallel)
    parallelize_module(model, _mesh("tp"), _mlp_splits(scenario.depth))
    return Program(model, batch)


def autopar(scenario: Scenario | Family, args: argparse.Namespace) -> Program:
    """Return the program that a plan describes."""
    import autopar

    model, batch = scenario.build()
    compiled = autopar.compile(
        model, str(args.cluster), example_inputs=batch, plan=autopar.Plan.load(args.plan), optimizer="adamw"
    )
    return Program(compiled, batch)


def pipeline(scenario: Scenario, _: argparse.Namespace) -> Program:
    """Return the program cut into stages of equally many layers by hand."""
    from benchmarks.testbed.pipeline import pipelined

    stage, run = pipelined(scenario)
    return Program(stage, (), "sum", run=run)


STRATEGIES: dict[str, Callable[[Any, argparse.Namespace], Program]] = {
    **{each.__name__: each for each in (ddp, fsdp2, tp, pipeline, autopar)},
    "flat": autopar,
}


def _mesh(axis: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))


def _own_samples(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return tuple(each.tensor_split(world)[rank].contiguous() for each in batch)


def _mlp_splits(depth: int) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {f"layers.{i}": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(depth)}


def _gpt_splits(model: Gpt, scenario: Scenario) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    splits: dict[str, Any] = {"head": ColwiseParallel(use_local_output=False)}
    for i in range(len(model.layers)):
        # The three projections read one DTensor, so that their input gradients are added before the one all-reduce.
        splits[f"layers.{i}.attention"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        )
        splits |= {f"layers.{i}.attention.{name}": ColwiseParallel() for name in "qkv"}
        splits |= {f"layers.{i}.attention.out": RowwiseParallel()}
        splits |= {f"layers.{i}.up": ColwiseParallel(), f"layers.{i}.down": RowwiseParallel()}
    # A split table costs an all-reduce of the activations; a whole one its gradient and update on every rank.
    if scenario.vocab > 4 * scenario.batch * scenario.seq:
        splits["tokens"] = RowwiseParallel(input_layouts=Replicate())
    return splits


def _loss_parallel() -> AbstractContextManager[Any]:
    from torch.distributed.tensor.parallel import loss_parallel

    context: AbstractContextManager[Any] = loss_parallel()
    return context


def measure(program: Program, warmup: int, steps: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each timed step, of the slowest rank, and the global loss of every step."""
    optimizer = torch.optim.AdamW(program.model.parameters(), lr=1e-3)
    seconds, losses = [], []
    for number in range(warmup + steps):
        dist.barrier()
        start = time.perf_counter()
        if program.run is not None:
            loss = program.run()
        else:
            with program.context():
                loss = program.model(*program.batch)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took = time.perf_counter() - start
        losses.append(_global_loss(loss, program.share))
        if number >= warmup:
            slowest = torch.tensor(took, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds.append(slowest.item())
    return seconds, losses


def _global_loss(loss: Any, share: str) -> float:
    whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    found: Tensor = whole.detach().clone()
    if share != "whole":
        dist.all_reduce(found)
    if share == "mean":
        found /= dist.get_world_size()
    return found.item()


def main() -> int:
    """Run one strategy of one scenario on this rank, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenario", choices=PROGRAMS, required=True)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--cluster", type=Path, help="for autopar: the cluster file of the plan")
    parser.add_argument("--plan", type=Path, help="for autopar: the plan")
    args = parser.parse_args()
    if args.strategy in {"autopar", "flat"} and not (args.cluster and args.plan):
        parser.error("autopar needs --cluster and --plan")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    program = STRATEGIES[args.strategy](PROGRAMS[args.scenario], args)
    seconds, losses = measure(program, args.warmup, args.steps)
    if dist.get_rank() == 0:
        print(json.dumps({"step_s": seconds, "losses": losses}), flush=True)
    dist.barrier()
    return 0


if __name__ == "__main__":
    # FSDP2's threads on gloo now and then abort the interpreter's own way out ("terminate called without an active
    # exception"), after the measurement and to no one's use.
    status = main()
    sys.stdout.flush()
    os._exit(status)
