"""`autopar verify`: a plan run on this machine beside the model on one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.run import TORCHRUN
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.options import PlanOptions

RESULT = "result.json"
"""Where rank 0 leaves what was found, in the folder that ranks share."""


def verify(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `autopar plan`.", show_default=False)],
    batch: Annotated[str | None, typer.Option(metavar="N", help="Global batch [the plan's].")] = None,
    seq: Annotated[str | None, typer.Option(metavar="N", help="Sequence length [the plan's].")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override of the model's configuration.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    shared: Annotated[Path | None, typer.Option("--on-rank", hidden=True)] = None,
) -> int:
    """Run a PLAN on this machine's CPU ranks and compare it with MODEL on one device.

    Losses, gradients and trained values, equality of replicas, order of collectives, memory. Exits with 1 where a
    check fails.
    """
    found = Plan.load(plan)
    tokens, samples = found.workload.tokens_per_step, found.workload.global_batch
    length = str(tokens // samples) if tokens and samples else None
    options = PlanOptions.parse(batch=batch or str(samples), seq=seq or length, set=set_)
    if shared is not None:
        return _on_rank(found, model, options, shared)
    ranks = found.decisions.mesh.world_size * found.decisions.degrees.get("pp", 1)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        command = [*TORCHRUN, f"--nproc-per-node={ranks}", "--standalone", "--no-python", sys.executable]
        command += ["-m", "autopar", "verify", str(plan), model, "--on-rank", folder]
        command += [part for name, value in (("--batch", batch), ("--seq", seq)) if value for part in (name, value)]
        command += [part for each in set_ or () for part in ("--set", each)]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, capture_output=True)
        result = Path(folder) / RESULT
        if not result.exists():
            from autopar.cli import INTERNAL_ERROR

            sys.stderr.write(done.stderr.decode(errors="replace"))
            print("autopar: a rank ended without a result; what it said is above", file=sys.stderr)
            return INTERNAL_ERROR
        told = json.loads(result.read_text(encoding="utf-8"))
    if "error" in told:
        print(f"autopar: {told['error']}", file=sys.stderr)
        return int(told["exit_code"])
    from autopar.report.verification import Check, verification_json, verification_text

    checks = [Check(**each) for each in told["checks"]]
    write = verification_json if as_json else verification_text
    sys.stdout.write(write(str(plan), model, ranks, checks))
    return 1 if any(each.outcome == "failed" for each in checks) else 0


def _on_rank(plan: Plan, model: str, options: PlanOptions, folder: Path) -> int:
    """Verify on this rank; rank 0 leaves what was found, or what went wrong, in the folder."""
    from dataclasses import asdict

    import torch

    from autopar.models.values import resolve_with_values

    torch.set_num_threads(1)
    first = os.environ.get("RANK") == "0"
    try:
        made, inputs = resolve_with_values(
            model, batch=options.batch, seq=options.seq, overrides=dict(options.set), seed=options.seed
        )
        from autopar.api.verifying import verify_on_rank  # takes seconds: a model that cannot be made is told before

        checks = verify_on_rank(plan, made, inputs, folder)
    except AutoparError as error:
        if first:
            told = {"error": str(error), "exit_code": error.exit_code}
            (folder / RESULT).write_text(json.dumps(told), encoding="utf-8")
        return error.exit_code
    if first:
        (folder / RESULT).write_text(json.dumps({"checks": [asdict(each) for each in checks]}), encoding="utf-8")
    return 0
