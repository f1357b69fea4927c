"""`autopar plan`: search the best program for a model on a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.files import require_writable
from autopar.options import FIX_KEYS, FORBID_KEYS, OPTIMIZERS, PRECISIONS, REDUCE_DTYPES, PlanOptions

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="FILE.py:FACTORY, PACKAGE.MODULE:FACTORY, zoo:NAME, hf:MODEL_TYPE or hf:PATH of a configuration.",
        show_default=False,
    ),
]
_Cluster = Annotated[
    str,
    typer.Option(
        "-c", "--cluster", metavar="CLUSTER", help="YAML file, preset, or DEVICE:PER_NODExNODES.", show_default=False
    ),
]
_Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where the plan goes; - is stdout.")
]
_Batch = Annotated[str | None, typer.Option(metavar="N", help="Global batch: samples a step.")]
_Seq = Annotated[str | None, typer.Option(metavar="N", help="Sequence length.")]
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override of the model's configuration.")
]
_Precision = Annotated[str | None, typer.Option(metavar="|".join(PRECISIONS), help="Of the computation [fp32].")]
_ReduceDtype = Annotated[
    str | None,
    typer.Option(metavar="|".join(REDUCE_DTYPES), help="In which type gradients of 16 bits are reduced [own]."),
]
_Optimizer = Annotated[str | None, typer.Option(metavar="|".join(OPTIMIZERS), help="Whose state is kept [adamw].")]
_Fix = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help=f"Demand a choice; keys: {' '.join(FIX_KEYS)}.")
]
_Forbid = Annotated[list[str] | None, typer.Option(metavar="KEY", help=f"Do without; keys: {' '.join(FORBID_KEYS)}.")]
_Constraint = Annotated[
    list[str] | None,
    typer.Option(metavar="FQN=PLACEMENT@AXIS", help="Demand a parameter's placement: 'lm_head.weight=Shard(0)@tp'."),
]
_MemoryMargin = Annotated[str | None, typer.Option(metavar="SHARE", help="Memory to keep free [10%].")]
_TimeLimit = Annotated[
    str | None, typer.Option(metavar="SECONDS", help="Computing time of the search [60]; longer if no plan is found.")
]
_Gap = Annotated[str | None, typer.Option(metavar="SHARE", help="Distance from the proven bound to stop at [0.01].")]
_Seed = Annotated[str | None, typer.Option(metavar="N", help="Of the search [0].")]
_TopK = Annotated[str | None, typer.Option(metavar="N", help="Candidates kept as alternatives [5].")]
_Overlap = Annotated[
    bool,
    typer.Option("--overlap/--no-overlap", help="Merge, hasten and separate collectives where that is faster."),
]
_TwoLevel = Annotated[
    bool,
    typer.Option("--two-level/--no-two-level", help="Collectives inside nodes and across where that is faster."),
]
_KeepOutputs = Annotated[
    bool | None,
    typer.Option(
        "--keep-outputs/--drop-outputs",
        help="What the model returns beside its loss, over all micro-batches of a step [kept if it fits].",
    ),
]
_Strict = Annotated[bool, typer.Option("--strict", help="An operator without a sharding rule is an error.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print the plan on stdout.")]


def plan(
    model: _Model,
    cluster: _Cluster,
    output: _Output = None,
    batch: _Batch = None,
    seq: _Seq = None,
    set_: _Set = None,
    precision: _Precision = None,
    reduce_dtype: _ReduceDtype = None,
    optimizer: _Optimizer = None,
    fix: _Fix = None,
    forbid: _Forbid = None,
    constraint: _Constraint = None,
    memory_margin: _MemoryMargin = None,
    time_limit: _TimeLimit = None,
    gap: _Gap = None,
    seed: _Seed = None,
    top_k: _TopK = None,
    overlap: _Overlap = True,
    two_level: _TwoLevel = True,
    keep_outputs: _KeepOutputs = None,
    strict: _Strict = False,
    as_json: _AsJson = False,
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
