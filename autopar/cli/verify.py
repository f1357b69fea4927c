"""`autopar verify`: a plan run on this machine beside the model on one device."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.on_ranks import found_in, leave, leave_complaint, on_ranks
from autopar.cli.planned import as_planned
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.options import PlanOptions


def verify(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `autopar plan`.", show_default=False)],
    batch: Annotated[str | None, typer.Option(metavar="N", help="Global batch [the plan's].")] = None,
    seq: Annotated[str | None, typer.Option(metavar="N", help="Sequence length [the plan's].")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override of the model's configuration [the plan's]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    shared: Annotated[Path | None, typer.Option("--on-rank", hidden=True)] = None,
) -> int:
    """Run a PLAN on this machine's CPU ranks and compare it with MODEL on one device.

    Losses, gradients and trained values, equality of replicas, order of collectives, memory. Exits with 1 where a
    check fails.
    """
    found = Plan.load(plan)
    options = as_planned(found, model, batch, seq, set_)
    if shared is not None:
        return _on_rank(found, model, options, shared)
    ranks = found.decisions.mesh.world_size * found.decisions.degrees.get("pp", 1)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        arguments = ["verify", str(plan), model]
        arguments += [part for name, value in (("--batch", batch), ("--seq", seq)) if value for part in (name, value)]
        arguments += [part for each in set_ or () for part in ("--set", each)]
        told = found_in(Path(folder), on_ranks(ranks, arguments, Path(folder), stdout=subprocess.DEVNULL))
    if isinstance(told, int):
        return told
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
    try:
        made, inputs = resolve_with_values(
            model, batch=options.batch, seq=options.seq, overrides=dict(options.set), seed=options.seed
        )
        from autopar.api.verifying import verify_on_rank  # takes seconds: a model that cannot be made is told before

        checks = verify_on_rank(plan, made, inputs, folder)
    except AutoparError as error:
        return leave_complaint(folder, error)
    leave(folder, {"checks": [asdict(each) for each in checks]})
    return 0
