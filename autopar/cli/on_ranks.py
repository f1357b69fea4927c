"""Commands that start ranks of themselves: how these are started, and how they tell what went wrong."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.cli.launching import QUIET_PROFILER, TORCHRUN, wait_for
from autopar.cli.torchrun import UNSAID
from autopar.errors import AutoparError

RESULT = "result.json"
"""Where the first rank leaves what was found or what went wrong, in the folder that ranks share."""

_BY_SIGNAL = 128


def on_ranks(ranks: int, arguments: Sequence[str], folder: Path, stdout: int | None = None) -> int:
    """Run `autopar ARGUMENTS --on-rank FOLDER` on so many ranks of this machine; return the exit status.

    Each has one thread where these are cores. What they say on stderr is seen as they say it; what they write to stdout
    goes to `stdout`, as for `subprocess`.

    Raises:
        KeyboardInterrupt: it was interrupted, and all ranks have ended.
    """
    flags = [f"--nproc-per-node={ranks}", "--standalone", "--no-python"]
    command = [*TORCHRUN, UNSAID, *flags, sys.executable, "-m", "autopar", *arguments, "--on-rank", str(folder)]
    return wait_for(command, QUIET_PROFILER | {"OMP_NUM_THREADS": "1"} | os.environ, stdout)


def leave(folder: Path, told: dict[str, Any]) -> None:
    """Write what was found for the command that started the ranks, on the first of them."""
    if os.environ.get("RANK") == "0":
        (folder / RESULT).write_text(json.dumps(told), encoding="utf-8")


def leave_complaint(folder: Path, error: AutoparError) -> int:
    """Write what is wrong for the command that started the ranks; return the exit status of it."""
    leave(folder, {"error": str(error), "exit_code": error.exit_code})
    return error.exit_code


def found_in(folder: Path, ended: int) -> dict[str, Any] | int:
    """Return what the first rank left in the folder, or, where something was wrong, the exit status, once it is told.

    `ended` is the status that the ranks ended with.
    """
    from autopar.cli import INTERNAL_ERROR

    result = folder / RESULT
    if not result.exists():
        if ended > _BY_SIGNAL:
            print(f"autopar: a rank was ended by {signal.Signals(ended - _BY_SIGNAL).name}", file=sys.stderr)
            return ended
        print("autopar: a rank ended without a result; what it said is above", file=sys.stderr)
        return INTERNAL_ERROR
    told: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "error" in told:
        print(f"autopar: {told['error']}", file=sys.stderr)
        return int(told["exit_code"])
    return told
