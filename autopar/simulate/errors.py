"""Messages about schedules that cannot run; each function returns the exception."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.ir.schedule import PipelineSchedule
from autopar.simulate.replay import Wait

_SHOWN = 8
"""Problems told at once; a schedule with one slip may have one a micro-batch."""


def broken(schedule: PipelineSchedule, problems: Sequence[str]) -> ScheduleError:
    """Return the error of a schedule with `problems`, the first of them told."""
    what = f"schedule {schedule.name!r}" if schedule.name else "the schedule"
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"    {problem}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"    and {len(problems) - _SHOWN} more")
    return ScheduleError("\n".join([f"{what} of {schedule.ranks} ranks cannot run, {count}:", *lines]))


def stuck(schedule: PipelineSchedule, waits: Sequence[Wait]) -> ScheduleError:
    """Return the error of a schedule whose ranks wait forever."""
    return broken(schedule, wait_problems(schedule, waits))


def other_stages(schedule: PipelineSchedule, stages: int) -> ScheduleError:
    """Return the error of costs for another number of stages."""
    return ScheduleError(f"the schedule has {schedule.stages} stages, but there are costs of {stages}")


def wait_problems(schedule: PipelineSchedule, waits: Sequence[Wait]) -> list[str]:
    """Return why ranks wait forever: actions that no rank runs, and cycles of ranks that wait for one another.

    Ranks that only wait for a rank in one of these are left out.
    """
    at = {wait.rank: wait for wait in waits}
    runs = {action: rank for rank, row in enumerate(schedule.actions) for action in row}
    waits_for: dict[int, int] = {}
    problems = []
    for wait in waits:
        wanted = [wait.missing]
        if wait.missing.kind == "I":
            wanted.append(wait.missing._replace(kind="B"))
        found = next((runs[each] for each in wanted if each in runs), None)
        if found is None:
            names = " or ".join(map(str, wanted))
            problems.append(
                f"rank {wait.rank} waits at {wait.action} ({wait.action.words}) for {names}, which no rank runs"
            )
        else:
            waits_for[wait.rank] = found
    return problems + [_cycle_text(cycle, at, waits_for) for cycle in _cycles(waits_for)]


def _cycles(waits_for: dict[int, int]) -> list[list[int]]:
    """Return the cycles of a graph in which every node has at most one successor, each from its lowest rank."""
    cycles = []
    seen: set[int] = set()
    for start in sorted(waits_for):
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = waits_for.get(rank)
        if rank in path:
            cycle = path[path.index(rank) :]
            lowest = cycle.index(min(cycle))
            cycles.append(cycle[lowest:] + cycle[:lowest])
    return cycles


def _cycle_text(cycle: Sequence[int], at: dict[int, Wait], waits_for: dict[int, int]) -> str:
    if len(cycle) == 1:
        wait = at[cycle[0]]
        return (
            f"rank {wait.rank} waits at {wait.action} ({wait.action.words}) for {wait.missing}, "
            "which it runs only later"
        )
    parts = [
        f"rank {rank} at {at[rank].action} ({at[rank].action.words}) for {at[rank].missing} of rank {waits_for[rank]}"
        for rank in cycle
    ]
    return f"deadlock, each waits for the next: {'; '.join(parts)}"
