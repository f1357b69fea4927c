"""Whether sharded programs compute what the single-device program does: models x meshes x plans, on real gloo ranks.

    python -m benchmarks.equivalence --models llama resnet --meshes 4 2x2

Compared with plain eager on one rank, in float32: the output of eval(), the loss, each gradient, the losses of five
AdamW steps and the parameters and buffers after them; and among the ranks, bit for bit, every value that the plan
replicates. A gradient that is small beside the whole (a key's bias, whose gradient is zero but for rounding) is
compared on the scale of the whole; `gradients_at_floor` counts these. One line of JSON a case, on stdout and in
benchmarks/results/equivalence.jsonl; --table FILE writes a Markdown table. Ends with 1 if a case is beyond a limit.

Everything a model needs is imported once; reference and ranks are forks of that process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.cases import MESHES, MODELS, PLANS, build, cases, cluster_of, size_of
from benchmarks.forks import fork, free_port, variables
from benchmarks.record import RESULTS, markdown, write

LIMITS = {"eval": 1e-5, "loss": 1e-5, "gradients": 1e-4, "steps": 1e-4, "state": 1e-4}
"""Largest relative differences: of values, and of norms for tensors."""

STEPS = 5


def results(model: Any, inputs: dict[str, Any], *, evaluate: bool = True) -> dict[str, Any]:
    """Return all that is compared, as tensors or DTensors; without `evaluate`, nothing of eval()."""
    import torch

    evaluated = []
    if evaluate:
        model.eval()
        with torch.no_grad():
            evaluated = _tensors(model(**inputs))
        model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], {}
    for step in range(STEPS):
        output = model(**inputs)
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        loss.backward()
        losses.append(loss.detach().clone())
        if step == 0:
            gradients = {name: p.grad.detach().clone() for name, p in _parameters(model) if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    state = {name: each.detach().clone() for name, each in (*_parameters(model), *model.named_buffers())}
    return {"eval": evaluated, "losses": losses, "gradients": gradients, "state": state}


def _parameters(model: Any) -> list[tuple[str, Any]]:
    """Return every parameter under each of its names: of tied ones, a rank may hold those of its stages only."""
    return list(model.named_parameters(remove_duplicate=False))


def _tensors(output: Any) -> list[Any]:
    """Return the tensors of a model's output, in order; `None` for those of other stages."""
    import torch

    from autopar.runtime.stand_ins import StandIn

    if isinstance(output, StandIn):
        return [None]
    if isinstance(output, torch.Tensor):
        return [output.detach().clone()]
    values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple | list) else ()
    return [tensor for each in values for tensor in _tensors(each)]


def differences(got: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the largest relative difference of each kind, and which tensor has that of the gradients."""
    from autopar.runtime.comparing import FLOOR, doubled, gradients_apart, joint_norm, relative

    found: dict[str, Any] = {"eval": _largest(got["eval"], wanted["eval"])}
    losses = [relative(a, b) for a, b in zip(got["losses"], wanted["losses"], strict=True)]
    found["loss"], found["steps"] = losses[0], max(losses)
    if got["gradients"].keys() != wanted["gradients"].keys():
        raise RuntimeError(f"other gradients: {got['gradients'].keys() ^ wanted['gradients'].keys()}")
    apart = gradients_apart(got["gradients"], wanted["gradients"])
    worst = max(apart, key=lambda name: apart[name])
    found |= {"gradients": apart[worst], "worst_gradient": worst}
    floor = FLOOR * joint_norm(wanted["gradients"])
    found["gradients_at_floor"] = sum(float(doubled(each).norm()) < floor for each in wanted["gradients"].values())
    found["state"] = _joint(got["state"], wanted["state"])
    return found


def _largest(got: list[Any], wanted: list[Any]) -> float:
    from autopar.runtime.comparing import relative

    return max((relative(a, b) for a, b in zip(got, wanted, strict=True)), default=0.0)


def _joint(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Return the relative difference of all tensors together."""
    from autopar.runtime.comparing import doubled

    apart = total = 0.0
    for name, each in wanted.items():
        apart += float((doubled(got[name]) - doubled(each)).norm()) ** 2
        total += float(doubled(each).norm()) ** 2
    return (apart / total) ** 0.5 if total else apart


def whole(value: Any) -> Any:
    """Return a result with every DTensor gathered, `None` where others have it; all ranks must call this alike."""
    from autopar.runtime import comparing

    return comparing.whole(value)


def unequal_replicas(found: dict[str, Any]) -> list[str]:
    """Return the names of values that differ in some bit between ranks that hold the same part of them."""
    from autopar.runtime import comparing

    values: dict[str, Any] = {}
    for group in ("losses", "gradients", "state"):
        each = found[group]
        values |= {
            f"{group} {name}": value for name, value in (each.items() if isinstance(each, dict) else enumerate(each))
        }
    return comparing.unequal_replicas(values)


def of_all_stages(found: dict[str, Any]) -> dict[str, Any]:
    """Return the results with what other ranks' stages have of them; all ranks must call this."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {group: found[group] for group in ("eval", "gradients", "state")})
    evaluated = [
        [each for each in values if each is not None]
        for values in zip(*(rank["eval"] for rank in everyone), strict=True)
    ]
    found = {**found, "eval": [values[0] for values in evaluated]}
    for group in ("gradients", "state"):
        found = {**found, group: {name: each for rank in everyone for name, each in rank[group].items()}}
    return found


def reference(name: str, size: tuple[int, int], out: Path) -> None:
    """Save the results of plain eager."""
    import torch

    torch.set_num_threads(1)
    torch.save(results(*build(name, *size)), out)


def make_plan(name: str, mesh: str, plan: str, out: Path) -> None:
    """Search the plan of a case and save it."""
    import autopar

    model, inputs = build(name, *size_of(PLANS[plan][mesh]))
    autopar.plan(model, cluster_of(mesh), example_inputs=inputs, fix=PLANS[plan][mesh]).save(out)


def rank_main(name: str, size: tuple[int, int], plan: Path, wanted: Path, out: Path) -> None:
    """Run a plan on this rank, and on rank 0 save how the results differ from the reference."""
    import torch
    import torch.distributed as dist

    import autopar

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, inputs = build(name, *size)
    loaded = autopar.Plan.load(plan)
    compiled = autopar.compile(model, autopar.ClusterSpec.from_dict(loaded.cluster), example_inputs=inputs, plan=loaded)
    found = results(compiled, inputs)
    unequal = unequal_replicas(found)
    gathered = whole(found)
    if loaded.decisions.stages:
        gathered = of_all_stages(gathered)
    if dist.get_rank() == 0:
        apart = differences(gathered, torch.load(wanted))
        out.write_text(json.dumps({**apart, "unequal_replicas": unequal}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run_case(name: str, mesh: str, plan: str, wanted: Path, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Return the row of one case."""
    row: dict[str, Any] = {"benchmark": "equivalence", "model": name, "mesh": mesh, "plan": plan}
    start = time.perf_counter()
    nodes, per_node = MESHES[mesh]
    planned, told = folder / "plan.json", folder / "result.json"
    for old in (planned, told):
        old.unlink(missing_ok=True)
    error = fork([(make_plan, (name, mesh, plan, planned), {})], timeout_s)
    if not error:
        from autopar.ir.plan import Plan

        decided = Plan.load(planned).decisions
        row |= {
            "axes": " ".join(part for part in (_stages(decided), str(decided.mesh)) if part),
            "micro_batches": decided.schedule.num_microbatches,
            "collectives": sum(each.count for each in decided.collectives),
        }
        size = size_of(PLANS[plan][mesh])
        ranks = nodes * per_node
        port = str(free_port())
        work = [(rank_main, (name, size, planned, wanted, told), variables(rank, ranks, port)) for rank in range(ranks)]
        error = fork(work, timeout_s)
    if error:
        return {**row, "ok": False, "error": error[-2000:], "seconds": round(time.perf_counter() - start, 1)}
    found = json.loads(told.read_text(encoding="utf-8"))
    ok = all(found[kind] <= limit for kind, limit in LIMITS.items()) and not found["unequal_replicas"]
    return {**row, "ok": ok, **found, "seconds": round(time.perf_counter() - start, 1)}


def _stages(decided: Any) -> str:
    """Return the pipeline ranks and the stages of a plan, empty without."""
    return f"pp={decided.degrees['pp']}, {len(decided.stages)} stages;" if decided.stages else ""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, with what was decided and what differs."""
    columns = [
        "model",
        "mesh",
        "plan",
        "axes",
        "micro_batches",
        "collectives",
        *LIMITS,
        "gradients_at_floor",
        "replicas",
        "ok",
    ]
    lines = [
        {**row, "replicas": "failed" if "error" in row else "differ" if row["unequal_replicas"] else "equal"}
        for row in rows
    ]
    limits = ", ".join(f"{kind} {limit:g}" for kind, limit in LIMITS.items())
    good = sum(row["ok"] for row in rows)
    return f"{good} of {len(rows)} cases within the limits ({limits}).\n\n{markdown(lines, columns)}"


def main() -> int:
    """Run every case asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument(
        "--timeout", type=float, default=240.0, help="seconds that planning, and running, may take each"
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="where a Markdown table goes")
    parser.add_argument("--output", type=Path, default=RESULTS / "equivalence.jsonl")
    args = parser.parse_args()
    # One thread: forks of a process that has started torch's thread pool hang.
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    # Before the forks, so that it happens once; all but the first are what torch itself loads for the first capture.
    for module in ("autopar.api.compiling", "sympy.tensor.tensor", "torch.distributed.checkpoint", "torch.testing"):
        import_module(module)
    if set(args.models) - {"mlp", "unet"}:
        import_module("autopar.models.hf_tiny")
        import_module("transformers")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, mesh, plan in cases(args.models, args.meshes, args.plans):
            size = size_of(PLANS[plan][mesh])
            wanted = Path(folder) / f"{name}-{size[0]}-{size[1]}.pt"
            if not wanted.exists():
                error = fork([(reference, (name, size, wanted), {})], args.timeout)
                if error:
                    raise RuntimeError(f"the reference of {name} failed:\n{error}")
            rows.append(run_case(name, mesh, plan, wanted, Path(folder), args.timeout))
            write(rows[-1], args.output)
    if args.table:
        args.table.write_text(table(rows), encoding="utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
