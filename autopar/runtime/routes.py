"""Which tensors a pipeline rank receives before and sends after each action, in an order that all ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import ScheduleError
from autopar.ir.schedule import Action, Kind, PipelineSchedule
from autopar.runtime.staged_program import Transfer

_MAKES: Mapping[str, tuple[Kind, ...]] = {"forward": ("F",), "backward": ("B", "I")}
"""The action that makes a transfer's tensor, and the one of the other stage that reads it."""

_UNITS: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time of an action when the shared order is made; a guess is enough, any order in time is correct."""


@dataclass(frozen=True, slots=True)
class Message:
    """One transfer of one micro-batch."""

    tag: int
    """A number that no other message of the step has."""

    transfer: Transfer
    source_rank: int
    """Of the pipeline, as `target_rank`."""

    target_rank: int
    source: Action
    target: Action
    sent_at: int
    """Position of `source` among the actions of its rank."""

    read_at: int
    """Position of `target` among the actions of its rank."""


@dataclass(frozen=True)
class Routes:
    """The actions of one pipeline rank, and its messages."""

    rank: int
    row: tuple[Action, ...]
    receives: tuple[tuple[Message, ...], ...]
    """Of each action: the messages that it reads."""

    sends: tuple[tuple[Message, ...], ...]
    """Of each action: the messages that it makes."""

    order: tuple[Message, ...]
    """All of them in the order in which the whole pipeline sends. Ranks that all keep to it never wait in a circle,
    also where a send waits for its receive and all transfers share one channel."""

    handed: tuple[tuple[Transfer, ...], ...]
    """Of each action: the transfers to another stage of the same rank."""


def forward_only(schedule: PipelineSchedule) -> PipelineSchedule:
    """Return the schedule's forward actions."""
    return replace(schedule, actions=tuple(tuple(a for a in row if a.kind == "F") for row in schedule.actions))


def routes(schedule: PipelineSchedule, transfers: Sequence[Transfer], rank: int) -> Routes:
    """Return the messages of pipeline rank `rank`; `transfers` may have phases whose actions the schedule lacks.

    Raises:
        ScheduleError: an action that makes or reads a transfer is missing, or ranks would wait forever.
    """
    schedule = schedule.compute_only()
    place = {action: (r, i) for r, row in enumerate(schedule.actions) for i, action in enumerate(row)}
    phases = {phase for phase, kinds in _MAKES.items() if any(action.kind in kinds for action in place)}
    messages: list[Message] = []
    local: list[Message] = []
    for index, transfer in enumerate(transfers):
        if transfer.phase not in phases:
            continue
        for microbatch in range(schedule.microbatches):
            source = _action(place, transfer.source, transfer.phase, microbatch)
            target = _action(place, transfer.target, transfer.phase, microbatch)
            (source_rank, sent_at), (target_rank, read_at) = place[source], place[target]
            tag = index * schedule.microbatches + microbatch
            message = Message(tag, transfer, source_rank, target_rank, source, target, sent_at, read_at)
            (local if source_rank == target_rank else messages).append(message)
    ends = _ends(schedule, [*messages, *local])
    messages.sort(key=lambda each: (ends[each.source], each.source_rank, each.tag))
    row = schedule.actions[rank]
    return Routes(
        rank,
        row,
        tuple(tuple(each for each in messages if each.target == action) for action in row),
        tuple(tuple(each for each in messages if each.source == action) for action in row),
        tuple(each for each in messages if rank in (each.source_rank, each.target_rank)),
        tuple(tuple(each.transfer for each in local if each.source == action) for action in row),
    )


def _action(place: Mapping[Action, object], stage: int, phase: str, microbatch: int) -> Action:
    found = [action for kind in _MAKES[phase] if (action := Action(stage, kind, microbatch)) in place]
    if not found:
        raise ScheduleError(
            f"the schedule has no {phase} of stage {stage}, micro-batch {microbatch}, which exchanges tensors with "
            "other stages; `autopar.simulate.check` lists all that is missing"
        )
    return found[0]


def _ends(schedule: PipelineSchedule, messages: Sequence[Message]) -> dict[Action, int]:
    """Return when each action ends in a time of units without transfer times."""
    needs: dict[Action, list[Action]] = {}
    for message in messages:
        needs.setdefault(message.target, []).append(message.source)
    ends: dict[Action, int] = {}
    position = [0] * schedule.ranks
    free = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while position[rank] < len(row):
                action = row[position[rank]]
                wanted = needs.get(action, [])
                if not all(each in ends for each in wanted):
                    break
                free[rank] = max([free[rank], *(ends[each] for each in wanted)]) + _UNITS[action.kind]
                ends[action] = free[rank]
                position[rank] += 1
                moved = True
    stuck = [row[at] for row, at in zip(schedule.actions, position, strict=True) if at < len(row)]
    if stuck:
        missing = next(each for each in needs[stuck[0]] if each not in ends)
        raise ScheduleError(
            f"{len(stuck)} pipeline ranks would wait forever: {stuck[0]} waits for {missing}, which comes behind it; "
            "`autopar.simulate.check` shows the circle"
        )
    return ends
