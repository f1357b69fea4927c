"""`autopar run`: torchrun with the ranks of a plan."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.launching import QUIET_PROFILER, TORCHRUN, wait_for
from autopar.errors import UsageError
from autopar.ir.plan import Plan

PLAN_VARIABLE = "AUTOPAR_PLAN"
"""Names the plan file to the script's processes: `autopar.compile` takes it where it is given no plan."""

PROFILE_VARIABLE = "AUTOPAR_PROFILE"
"""Names the folder into which the script's processes write measured timelines."""


def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)],
    script: Annotated[
        list[str], typer.Argument(metavar="-- SCRIPT [ARGS]...", help="FILE.py or -m MODULE.", show_default=False)
    ],
    nnodes: Annotated[int, typer.Option(metavar="N", min=1, help="Machines that run the script together.")] = 1,
    node_rank: Annotated[int, typer.Option(metavar="I", min=0, help="Which of them this one is.")] = 0,
    rendezvous: Annotated[
        str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Of the first machine.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Measure a few steps with torch.profiler; see `autopar show PLAN --compare DIR`."
        ),
    ] = None,
) -> int:
    """Run a script under torchrun with a plan's ranks.

    Exits with the status of the rank that failed first (128 and the number of a signal that ended it); where an error
    of autopar ended it, with that of the error (2, 3, 4, 5).
    """
    found = Plan.load(plan)
    command = launch_command(found, script, nnodes, node_rank, rendezvous)
    if nnodes > 1 and node_rank == 0 and rendezvous is not None:
        require_free_port(rendezvous)
    variables = environment(found, plan, os.environ)
    if profile is not None:
        variables = {**QUIET_PROFILER, **variables, PROFILE_VARIABLE: str(writable_folder(profile))}
    return wait_for(command, variables)


def writable_folder(folder: Path) -> Path:
    """Return the folder as an absolute path, made if there is none, empty of what was measured before.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*.json"):
            old.unlink()
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror}; choose another --profile DIR") from None
    return folder.resolve()


def launch_command(plan: Plan, script: list[str], nnodes: int, node_rank: int, rendezvous: str | None) -> list[str]:
    """Return torchrun's command for the ranks of this machine.

    Raises:
        UsageError: the script does not exist, or the machines cannot share the plan's ranks.
    """
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise UsageError(
            f"there is no script {script[0]!r}; write `autopar run PLAN -- train.py ARGS` or `-- -m MODULE ARGS`"
        )
    if script == ["-m"]:
        raise UsageError("-m needs the name of a module; write `autopar run PLAN -- -m MODULE ARGS`")
    ranks = plan.decisions.mesh.world_size * plan.decisions.degrees.get("pp", 1)
    if ranks % nnodes:
        raise UsageError(f"the plan's {ranks} ranks cannot be shared evenly by --nnodes {nnodes} machines")
    if node_rank >= nnodes:
        raise UsageError(f"--node-rank {node_rank} is no machine of --nnodes {nnodes}; they are 0..{nnodes - 1}")
    if nnodes > 1 and rendezvous is None:
        raise UsageError(f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT, an address of the first machine")
    if nnodes == 1 and rendezvous is not None:
        raise UsageError(
            f"--rdzv-endpoint {rendezvous} is where several machines meet; say with --nnodes N how many, or leave "
            "it out"
        )
    if rendezvous is not None:
        host_and_port(rendezvous)
    return [*TORCHRUN, *rank_flags(ranks // nnodes, nnodes, node_rank, rendezvous), *script]


def rank_flags(local_ranks: int, nnodes: int, node_rank: int, rendezvous: str | None) -> list[str]:
    """Return torchrun's flags for the ranks of this machine, whose numbers follow from `node_rank`."""
    local = f"--nproc-per-node={local_ranks}"
    if nnodes == 1:
        return [local, "--standalone"]
    return [
        local,
        f"--nnodes={nnodes}",
        f"--node-rank={node_rank}",
        "--rdzv-backend=static",  # c10d numbers machines as they come: the plan's order is that of the cluster's groups
        f"--rdzv-endpoint={rendezvous}",
    ]


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Return the two parts of `HOST:PORT`; the host of `[::1]:29500` is without its brackets.

    Raises:
        UsageError: the text is not of that form, or no port has that number.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(
            f"--rdzv-endpoint {endpoint}: must be HOST:PORT with a port of 1 to 65535, such as node0.local:29500"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def require_free_port(endpoint: str) -> None:
    """Check that this machine can listen at the port, or torchrun would wait for whoever listens there already.

    Raises:
        UsageError: it cannot.
    """
    _, port = host_and_port(endpoint)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen()
    except OSError as error:
        raise UsageError(
            f"--rdzv-endpoint {endpoint}: this machine cannot listen at port {port} ({error.strerror}); give all "
            "machines another port, one that is free here"
        ) from None


def environment(plan: Plan, path: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the launched processes: the plan, and one thread a rank where ranks are CPU cores."""
    found = {**outer, PLAN_VARIABLE: str(path.resolve())}
    devices: Any = plan.cluster.get("devices", {})
    if any(isinstance(each, Mapping) and each.get("kind") == "cpu" for each in devices.values()):
        found.setdefault("OMP_NUM_THREADS", "1")
    return found
