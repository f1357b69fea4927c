"""How commands start torchrun and wait for it, so that no rank is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

TORCHRUN = (sys.executable, "-m", "autopar.cli.torchrun")

QUIET_PROFILER = {"KINETO_LOG_LEVEL": "6"}
"""Variables with which torch's profiler does not write when it starts and stops, a line a rank, to stderr."""


def wait_for(command: Sequence[str], variables: Mapping[str, str], stdout: int | None = None) -> int:
    """Run a command; return its exit status, 128 and the number of the signal where one ended it.

    It has a process group of its own: a Ctrl-C at the terminal, like a request to end, comes here and is handed on
    once. Of two signals the second would interrupt torchrun while it ends its ranks.

    Raises:
        KeyboardInterrupt: it was interrupted, and has ended.
    """
    signals: list[int] = []
    with subprocess.Popen(list(command), env=dict(variables), stdout=stdout, process_group=0) as process:

        def hand_on(number: int, _frame: FrameType | None) -> None:
            if not signals:
                process.terminate()
            signals.append(number)

        before = {each: signal.signal(each, hand_on) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    return status if status >= 0 else 128 - status
