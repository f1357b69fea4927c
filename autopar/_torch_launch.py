"""torchrun's agent with two hooks, by private methods of it: while its ranks run, and when all have succeeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api as launcher


def hook_agent(ranks_run: Callable[[WorkerGroup], None], ranks_succeeded: Callable[[WorkerGroup], None]) -> None:
    """Let torchrun's agent call these: again and again while its ranks run, and once in place of its exit barrier.

    What they raise ends the agent, which ends its ranks.
    """

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: Any = super()._monitor_workers(worker_group)
            if result.state is WorkerState.HEALTHY:
                ranks_run(worker_group)
            return result  # type: ignore[no-any-return]

        def _exit_barrier(self) -> None:
            ranks_succeeded(self._worker_group)

    launcher.LocalElasticAgent = Agent  # type: ignore[attr-defined]
