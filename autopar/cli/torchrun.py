"""torchrun as commands start it: how its ranks ended is told in a line, and their status is its own.

    python -m autopar.cli.torchrun [--unsaid] FLAGS_OF_TORCHRUN SCRIPT [ARGS]...

torchrun itself exits with 1 whatever the status of a rank was, below a traceback of its own. Of several machines, each
ends as the one does whose rank failed first.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.cli.machines import End, MachineFailedError, Machines
from autopar.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup

UNSAID = "--unsaid"
"""First argument of commands that tell themselves how their ranks ended."""

_SAID_HERE = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")
"""Loggers of torchrun that tell of ranks which end, by process id and in several lines."""

_SHOWN = 4


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with these arguments; return the status of the rank that failed first, 0 where none did."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    end_with_parent()
    says = arguments[:1] != [UNSAID]
    parsed = parse_args(arguments if says else arguments[1:])  # type: ignore[no-untyped-call]
    for name in _SAID_HERE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    machines = Together()
    if parsed.nnodes not in ("1", "1:1"):
        machines.hook()
    try:
        run(parsed)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        text, status = verdict(error.failures, error.name)
        first = machines.fail(text, status, lost=lost_others(error.failures))
        if says:
            print(f"autopar: {text}", *([] if first is None else [f"first {first}"]), sep="\n    ", file=sys.stderr)
        return status if first is None else first.status
    except MachineFailedError as error:
        if says:
            print(f"autopar: {error}", file=sys.stderr)
        return error.end.status
    except SignalException as error:
        status = 128 + int(error.sigval)
        machines.fail(f"torchrun was ended by {signal.Signals(error.sigval).name}", status, asked=True)
        return status
    except (DistError, RendezvousError) as error:
        print(f"autopar: {cannot_meet(parsed.rdzv_endpoint, error)}", file=sys.stderr)
        return UsageError.exit_code
    return 0


class Together:
    """The machines of this run, from when they have met; none where there is one alone."""

    def __init__(self) -> None:
        self._machines: Machines | None = None

    def hook(self) -> None:
        """Look after the other machines while the ranks of this one run, and when they have ended."""
        from autopar._torch_launch import hook_agent

        hook_agent(lambda group: self._of(group).go_on(), lambda group: self._of(group).succeed())

    def fail(self, text: str, status: int, *, lost: bool = False, asked: bool = False) -> End | None:
        """Tell the others how this machine failed; return how another one did, if that was before."""
        if self._machines is None:
            return None
        end = End(self._machines.node, status, text, lost, asked)
        first = self._machines.fail(end)
        return None if first is end else first

    def _of(self, group: WorkerGroup) -> Machines:
        if self._machines is None:
            self._machines = Machines(group.store, group.group_rank, group.group_world_size)  # type: ignore[arg-type]
        return self._machines


def lost_others(failures: Mapping[int, Any]) -> bool:
    """Return whether all ranks that failed by themselves only lost others."""
    own = [each for each in failures.values() if each.exitcode != -signal.SIGTERM]
    return bool(own) and all(_told(each).get("lost", False) for each in own)


def verdict(failures: Mapping[int, Any], script: str) -> tuple[str, int]:
    """Return what is told of the ranks that failed, torch's `ProcessFailure` by rank, and the status to exit with.

    The first is the first that failed by itself: others lose it, or are ended by torchrun.
    """
    own = {rank: each for rank, each in failures.items() if each.exitcode != -signal.SIGTERM} or failures
    order = sorted(own, key=lambda rank: (_told(own[rank]).get("lost", False), own[rank].timestamp, rank))
    said = [f"rank {rank} (process {own[rank].pid}) {_end(own[rank])}" for rank in order]
    more = f"\n    and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    text = f"{script}: {said[0]}; all ranks were stopped" + "".join(f"\n    then {each}" for each in said[1:_SHOWN])
    return text + more, _status(own[order[0]])


def _told(failure: Any) -> Mapping[str, Any]:
    """Return what a rank left in torchrun's error file (`runtime.last_words`); nothing where it left nothing."""
    message = failure.error_file_data.get("message")
    return message if isinstance(message, Mapping) else {}


def _status(failure: Any) -> int:
    exitcode = int(failure.exitcode)
    return 128 - exitcode if exitcode < 0 else int(_told(failure).get("errorCode", exitcode))


def _end(failure: Any) -> str:
    if failure.exitcode < 0:
        return f"was ended by {failure.signal_name()}"
    words = str(_told(failure).get("message", "")).splitlines()
    said = f": {words[0].rstrip(':')}" if words else "; see its own output above"
    return f"ended with status {_status(failure)}{said}"


def cannot_meet(endpoint: str, error: Exception) -> str:
    """Return the message about machines whose torchruns do not find one another."""
    cause = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
    return (
        f"the machines cannot meet at {endpoint or 'a free port of this one'}: {cause}\ngive all of them the same "
        "--rdzv-endpoint HOST:PORT, with a free port of the first machine (--node-rank 0), and start that one too"
    )


def end_with_parent() -> None:
    """Ask the system to end this process, and so its ranks, where the command that started it is killed."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
