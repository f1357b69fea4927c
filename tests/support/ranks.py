"""Real gloo ranks for tests: processes that stay up, forked from one that has imported all they need.

    with RankPool(2) as pool:
        outcomes = pool.run(function, argument)     # function(rank, argument) on every rank
        outcomes[0].value                           # or .error, if the function raised there

`function` is a module-level function of a test module. A task that takes too long
kills all ranks and fails the test; the next task starts new ones.

The process that ranks are forked from has no threads and no process group: a rank starts as if it were new, without
the seconds of its imports and of the first program that is captured, planned and stepped (`tests.support.warm`).
Its environment is the one in which the first pool was started.
Forked ranks hash alike. Ranks of a job do not, so that what depends on the order of a set differs from rank to
rank there: `RankPool(2, forked=False)` has an interpreter of its own for each rank.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

_IMPORTED = (
    "pytest", "sympy.tensor.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.testing",
    "autopar.api.compiling", "tests.support.remembering", "tests.support.routing", "tests.support.training",
    "tests.support.warm",
)  # fmt: skip
"""What ranks would import, and do for the first time, otherwise, each by itself."""


@dataclass(frozen=True)
class Outcome:
    """What a task came to on one rank."""

    value: Any = None
    error: str = ""
    """Type and text of the exception, empty if there was none."""

    kind: str = ""
    """Name of the exception's type."""

    trace: str = ""


class RankPool:
    """Gloo ranks that run one task after another."""

    def __init__(self, ranks: int, *, forked: bool = True) -> None:
        self._ranks = ranks
        self._forked = forked
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-ranks-")
        self._workers: list[tuple[Any, Connection]] = []
        self._started = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._folder.cleanup()

    def run(self, task: Callable[..., Any], *args: Any, timeout_s: float = 120, may_die: bool = False) -> list[Outcome]:
        """Return each rank's outcome of `task(rank, *args)`; fails if not all have come within `timeout_s`.

        With `may_die`, a rank that dies has the outcome of that kind, and the next task starts new ranks.
        """
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((task, args))
        outcomes: list[Outcome | None] = [None] * self._ranks
        end = time.monotonic() + timeout_s
        while None in outcomes:
            pending = [pipe for (_, pipe), outcome in zip(self._workers, outcomes, strict=True) if outcome is None]
            ready = wait(pending, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                self.close(kill=True)
                late = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
                raise TimeoutError(f"ranks {late} did not finish within {timeout_s} s; others: {outcomes}")
            for rank, (_, pipe) in enumerate(self._workers):
                if pipe in ready:
                    try:
                        outcomes[rank] = pipe.recv()
                    except EOFError:
                        if not may_die:
                            self.close(kill=True)
                            raise RuntimeError(f"rank {rank} died") from None
                        outcomes[rank] = Outcome(error="died", kind="died")
        if may_die:
            self.close(kill=True)
        return [outcome for outcome in outcomes if outcome is not None]

    def values(self, task: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """Return each rank's result; fails with the first rank's traceback if any raised."""
        outcomes = self.run(task, *args, timeout_s=timeout_s)
        failed = [outcome for outcome in outcomes if outcome.error]
        if failed:
            raise AssertionError(failed[0].trace)
        return [outcome.value for outcome in outcomes]

    def close(self, *, kill: bool = False) -> None:
        """Stop the ranks: at once, or when they have left their process group."""
        for process, pipe in self._workers:
            if kill:
                process.kill()
            else:
                pipe.send(None)
        for process, pipe in self._workers:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._workers = []

    def _start(self) -> None:
        context: Any = forking() if self._forked else multiprocessing.get_context("spawn")
        self._started += 1
        store = str(Path(self._folder.name) / f"store{self._started}")
        for rank in range(self._ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self._ranks, store), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def forking() -> ForkServerContext:
    """Return the context whose processes are forks of one that has imported, and done once, what ranks need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    return context


def _serve(pipe: Connection, rank: int, ranks: int, store: str) -> None:
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    faulthandler.enable()  # a rank that dies says where
    import torch
    import torch.distributed as dist

    from tests.support.remembering import remember_programs

    remember_programs()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            outcome = Outcome(value=function(rank, *args))
        except Exception as error:  # noqa: BLE001
            kind = type(error).__name__
            outcome = Outcome(error=f"{kind}: {error}", kind=kind, trace=traceback.format_exc())
        pipe.send(outcome)
    dist.destroy_process_group()
    os._exit(0)  # what is held may go as it is: to take torch down in order takes seconds
