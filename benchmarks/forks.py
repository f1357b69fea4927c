"""Functions in processes of their own: forks of one that has imported what they need, side by side as ranks are.

The parent may not have started torch's thread pool, or its forks hang.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def fork(work: Sequence[tuple[Callable[..., None], tuple[Any, ...], dict[str, str]]], timeout_s: float) -> str:
    """Run functions side by side, each in a fork with its variables, and return the text of the first failure."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(number) for number in range(len(work))]
        children = [
            context.Process(target=_child, args=(function, arguments, variables, log))
            for (function, arguments, variables), log in zip(work, logs, strict=True)
        ]
        for child in children:
            child.start()
        end = time.monotonic() + timeout_s
        while any(child.is_alive() for child in children) and time.monotonic() < end:
            if any(child.exitcode for child in children):
                time.sleep(1.0)  # the others may be about to say more
                break
            time.sleep(0.05)
        late = [child for child in children if child.is_alive()]
        for child in late:
            child.kill()
        for child in children:
            child.join()
        said = [log.read_text(encoding="utf-8") for log in logs if log.exists()]
        codes = [child.exitcode for child in children]
    if said:
        return min(said, key=len)
    if late:
        return f"{len(late)} of {len(work)} not done within {timeout_s:.0f} s"
    return "" if not any(codes) else f"ended with {codes}"


def _child(function: Callable[..., None], arguments: tuple[Any, ...], variables: dict[str, str], log: Path) -> None:
    os.environ.update(variables)
    try:
        function(*arguments)
    except Exception:  # noqa: BLE001  told to the parent, which lets the case fail
        log.write_text(traceback.format_exc(limit=-4), encoding="utf-8")
        os._exit(1)


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def variables(rank: int, world: int, port: str) -> dict[str, str]:
    """Return the variables that torchrun would give a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
