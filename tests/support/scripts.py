"""A training script on real ranks, with the variables that torchrun gives them, in forks of a process that is warm.

run_script(EXAMPLES / "moe.py", ranks=4)     # what rank 0 printed
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.ranks import forking


def run_script(
    path: Path, ranks: int, *arguments: str, before: Callable[[], None] | None = None, timeout_s: float = 300
) -> str:
    """Return what rank 0 of a script prints; every rank must end well in time. 0 ranks: the script without torchrun.

    `before` is a module-level function that each process calls first.
    """
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    of_all = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **variables} if ranks else {}
    with tempfile.TemporaryDirectory(prefix="autopar-script-") as folder:
        logs = [Path(folder) / str(rank) for rank in range(max(ranks, 1))]
        processes = [
            forking().Process(target=_main, args=(path, arguments, each, log, before))
            for rank, log in enumerate(logs)
            for each in [{**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}]
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout_s
        while any(each.is_alive() for each in processes) and not any(each.exitcode for each in processes):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        late = [rank for rank, each in enumerate(processes) if each.is_alive()]
        for each in processes:
            each.kill()
            each.join()
        failed = [rank for rank, each in enumerate(processes) if each.exitcode and rank not in late]
        told = [log.with_suffix(".err") for log in logs if log.with_suffix(".err").exists()]
        said = "\n".join(each.read_text(encoding="utf-8")[-2000:] for each in told)
        assert not failed + late, f"{path.name}: ranks {failed} failed, ranks {late} were at work:\n{said}"
        return logs[0].with_suffix(".out").read_text(encoding="utf-8")


def _main(
    path: Path, arguments: tuple[str, ...], variables: dict[str, str], log: Path, before: Callable[[], None] | None
) -> None:
    for name in ("RANK", "WORLD_SIZE", "AUTOPAR_PLAN"):
        os.environ.pop(name, None)
    os.environ.update(variables, OMP_NUM_THREADS="1", NO_COLOR="1")
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(log.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), stream)
    sys.argv, sys.path[:0] = [str(path), *arguments], [str(path.parent)]
    _remember(path)
    if before is not None:
        before()
    runpy.run_path(str(path), run_name="__main__")


def _remember(path: Path) -> None:
    """Let the ranks of a script share their captures; of two scripts, classes of one name may be unlike."""
    from tests.support.remembering import FOLDER, remember_programs

    if FOLDER in os.environ:
        own = Path(os.environ[FOLDER]) / path.stem
        own.mkdir(exist_ok=True)
        os.environ[FOLDER] = str(own)
        remember_programs()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
