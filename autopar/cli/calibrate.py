"""`autopar calibrate`: what this machine really does, as figures of the cost model."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.files import require_writable, write
from autopar.cli.on_ranks import found_in, leave, leave_complaint, on_ranks
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from cost_models.calibration import Calibration
    from cost_models.cluster import ClusterSpec


def calibrate(
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Instead of stdout.")] = None,
    cluster: Annotated[
        str | None, typer.Option("-c", "--cluster", metavar="CLUSTER", help="What this machine is; default: detected.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", min=1, help="Of this machine; default: all its devices.")
    ] = None,
    from_nccl_tests: Annotated[
        list[Path] | None,
        typer.Option("--from-nccl-tests", metavar="FILE", help="Output of nccl-tests, instead of measuring."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller sizes, in less time.")] = False,
    shared: Annotated[Path | None, typer.Option("--on-rank", hidden=True)] = None,
) -> int:
    """Measure this machine: matmuls, memory, launches, collectives on every link level.

    Starts one rank a device with torchrun. Under a launcher that sets RANK (torchrun on several machines), each process
    is a rank, and the first one writes. The table of figures with their spread goes to stderr.
    """
    if output is not None:
        require_writable(output)
    try:
        return _calibrate(output, cluster, ranks, from_nccl_tests, quick, shared)
    except AutoparError as error:
        if shared is None:
            raise
        return leave_complaint(shared, error)


def _calibrate(
    output: Path | None,
    cluster: str | None,
    ranks: int | None,
    from_nccl_tests: list[Path] | None,
    quick: bool,
    shared: Path | None,
) -> int:
    from autopar.api.calibrating import described, imported, is_launched, measured
    from autopar.progress import Terminal
    from autopar.report.calibration import calibration_text, disturbed

    spec = described(cluster)
    found: Calibration | None
    if from_nccl_tests:
        found = imported(from_nccl_tests, spec)
    elif is_launched(os.environ):
        with Terminal() as progress:
            found = measured(spec, quick=quick, progress=progress)
    else:
        return _started(_node_ranks(spec, ranks), _arguments(output, cluster, quick=quick))
    if found is not None:
        sys.stderr.write(calibration_text(found))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if said := disturbed(found, cores):
            sys.stderr.write(f"warning: {said}\n")
        write(found.to_json(), output)
        if shared is not None:
            leave(shared, {})
    return 0


def _started(ranks: int, arguments: list[str]) -> int:
    """Calibrate on ranks of this machine; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="autopar-calibrate-") as folder:
        told = found_in(Path(folder), on_ranks(ranks, arguments, Path(folder)))
    return told if isinstance(told, int) else 0


def _node_ranks(spec: ClusterSpec | None, ranks: int | None) -> int:
    from cost_models.cluster import ClusterSpec

    return ranks or (spec or ClusterSpec.detect()).devices_per_node


def _arguments(output: Path | None, cluster: str | None, *, quick: bool) -> list[str]:
    found = ["calibrate", *(["--quick"] if quick else [])]
    if output is not None:
        found += ["-o", str(output)]
    if cluster is not None:
        found += ["-c", cluster]
    return found
