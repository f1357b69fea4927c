"""`autopar plan`: search the best program for a model on a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.files import require_writable
from autopar.options import FIX_KEYS, FORBID_KEYS, OPTIMIZERS, PRECISIONS, REDUCE_DTYPES, PlanOptions


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="FILE.py:FACTORY, PACKAGE.MODULE:FACTORY, zoo:NAME, hf:MODEL_TYPE or hf:PATH of a configuration.",
            show_default=False,
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            "-c",
            "--cluster",
            metavar="CLUSTER",
            help="YAML file, preset, or DEVICE:PER_NODExNODES.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where the plan goes; - is stdout.")
    ] = None,
    batch: Annotated[str | None, typer.Option(metavar="N", help="Global batch: samples a step.")] = None,
    seq: Annotated[str | None, typer.Option(metavar="N", help="Sequence length.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override of the model's configuration.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="|".join(PRECISIONS), help="Of the computation [fp32].")
    ] = None,
    reduce_dtype: Annotated[
        str | None,
        typer.Option(metavar="|".join(REDUCE_DTYPES), help="In which type gradients of 16 bits are reduced [own]."),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(metavar="|".join(OPTIMIZERS), help="Whose state is kept [adamw].")
    ] = None,
    fix: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help=f"Demand a choice; keys: {' '.join(FIX_KEYS)}.")
    ] = None,
    forbid: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help=f"Do without; keys: {' '.join(FORBID_KEYS)}.")
    ] = None,
    constraint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FQN=PLACEMENT@AXIS", help="Demand a parameter's placement: 'lm_head.weight=Shard(0)@tp'."
        ),
    ] = None,
    memory_margin: Annotated[str | None, typer.Option(metavar="SHARE", help="Memory to keep free [10%].")] = None,
    time_limit: Annotated[
        str | None, typer.Option(metavar="SECONDS", help="Computing time of the search [60].")
    ] = None,
    gap: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Distance from the proven bound to stop at [0.01].")
    ] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Of the search [0].")] = None,
    top_k: Annotated[str | None, typer.Option(metavar="N", help="Candidates kept as alternatives [5].")] = None,
    overlap: Annotated[
        bool,
        typer.Option("--overlap/--no-overlap", help="Merge, hasten and separate collectives where that is faster."),
    ] = True,
    two_level: Annotated[
        bool,
        typer.Option("--two-level/--no-two-level", help="Collectives inside nodes and across where that is faster."),
    ] = True,
    keep_outputs: Annotated[
        bool | None,
        typer.Option(
            "--keep-outputs/--drop-outputs",
            help="What the model returns beside its loss, over all micro-batches of a step [kept if it fits].",
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="An operator without a sharding rule is an error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan on stdout.")] = False,
) -> int:
    """Search the best program for MODEL on CLUSTER.

    The plan goes to -o FILE, a table and one line of summary to stderr.
    """
    options = PlanOptions.parse(
        batch=batch,
        seq=seq,
        set=set_,
        precision=precision,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        fix=fix,
        forbid=forbid,
        constraint=constraint,
        memory_margin=memory_margin,
        time_limit=time_limit,
        gap=gap,
        seed=seed,
        top_k=top_k,
        overlap=overlap,
        two_level=two_level,
        keep_outputs=keep_outputs,
        strict=strict,
    )
    return _plan(model, cluster, options, output, as_json)


def _plan(model: str, cluster: str, options: PlanOptions, output: Path | None, as_json: bool) -> int:
    saved = output is not None and str(output) != "-"
    if output is not None and saved:
        require_writable(output)
    from autopar import api
    from autopar.cli import INTERRUPTED
    from autopar.progress import Terminal

    with Terminal() as progress:
        found: Any = api.plan_reference(model, cluster, options, progress)
    if saved:
        found.save(output)
    if as_json or str(output) == "-":
        from autopar.ir.plan_json import to_json

        sys.stdout.write(to_json(found))
    from autopar.report.table import print_table
    from autopar.simulate.planned import planned_timeline

    print_table(found, sys.stderr, planned_timeline(found))
    if found.solver.status == "interrupted":
        kept = f"the best plan so far is in {output}" if saved else "the best plan so far is above"
        print(f"autopar: interrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    return 0
