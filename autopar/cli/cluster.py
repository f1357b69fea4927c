"""`autopar cluster`: look at, list, check and detect cluster descriptions."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.files import write

if TYPE_CHECKING:
    from cost_models.cluster import ClusterSpec

app = typer.Typer(help="Look at, list, check and detect clusters.", rich_markup_mode=None)

_AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


@app.command()
def show(
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="YAML file, preset or shorthand.", show_default=False)
    ],
    as_json: _AsJson = False,
) -> int:
    """Print a cluster with every figure filled in, as a cluster file."""
    from cost_models.cluster import ClusterSpec

    sys.stdout.write(_document(ClusterSpec.parse(cluster), as_json))
    return 0


@app.command(name="list")
def list_(as_json: _AsJson = False) -> int:
    """List the presets of nodes and devices."""
    from cost_models import catalog
    from cost_models.cluster import ClusterSpec

    nodes = {name: ClusterSpec.parse(name) for name in catalog.names("nodes")}
    devices = {name: ClusterSpec.parse(f"{name}:1").device for name in catalog.names("devices")}
    if as_json:
        sys.stdout.write(json.dumps({"nodes": list(nodes), "devices": list(devices)}, indent=1) + "\n")
        return 0
    rows: list[tuple[str, ...]] = [("nodes", "devices", "")]
    rows += [(f"  {name}", f"{each.device_count} x {each.device.name}", "") for name, each in nodes.items()]
    rows.append(("devices", "memory", "bf16"))
    for name, device in devices.items():
        rate = device.peak_flops.get("bfloat16")
        dense = f"{rate / 1e12:.4g} TFLOP/s" if rate else "-"
        rows.append((f"  {name}", f"{device.memory_bytes / 2**30:.4g} GiB", dense))
    sys.stdout.write(_columns(rows))
    return 0


@app.command()
def validate(
    clusters: Annotated[list[str], typer.Argument(metavar="CLUSTER...", help="Cluster files.", show_default=False)],
) -> int:
    """Check cluster files; the first error is told with its key path."""
    from cost_models.cluster import ClusterSpec

    for each in clusters:
        sys.stdout.write(f"{each}: valid, {_size(ClusterSpec.parse(each))}\n")
    return 0


@app.command()
def detect(
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Instead of stdout.")] = None,
    cpu_ranks: Annotated[
        int | None,
        typer.Option("--cpu-ranks", metavar="N", min=1, help="So many CPU ranks; they share cores if these are fewer."),
    ] = None,
    calibration: Annotated[
        str, typer.Option(metavar="FILE", help="Named in the cluster file, whose figures are then measured ones.")
    ] = "",
    as_json: _AsJson = False,
) -> int:
    """Print this machine as a cluster file."""
    from cost_models.cluster import ClusterSpec

    write(_document(replace(ClusterSpec.detect(cpu_ranks), calibration=calibration), as_json), output)
    return 0


def _document(spec: ClusterSpec, as_json: bool) -> str:
    document = spec.to_dict()
    if as_json:
        return json.dumps(document, indent=1) + "\n"
    import yaml

    text: Any = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=110)
    return f"# {_size(spec)}\n{text}"


def _size(spec: ClusterSpec) -> str:
    devices, nodes = spec.device_count, spec.node_count
    return f"{devices} device{'s' if devices > 1 else ''} in {nodes} node{'s' if nodes > 1 else ''}"


def _columns(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)
