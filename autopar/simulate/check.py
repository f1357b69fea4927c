"""Whether a schedule can run, found without running it: the actions of all ranks are replayed on paper.

Found are actions that are missing, doubled, or on another rank than their stage; sends without receive, receives
without send, and messages of one pair of ranks in different orders; ranks that wait for one another; and ranks that
hold more bytes than there are. What a rank holds depends on the order of its own actions only, so no times are needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from autopar.figures import format_bytes
from autopar.ir.pipeline import PipelineCosts
from autopar.ir.schedule import COMPUTE, Action, Kind, PipelineSchedule
from autopar.simulate.errors import broken, other_stages, wait_problems
from autopar.simulate.memory import levels, static_bytes
from autopar.simulate.replay import Neighbours, neighbours, replay


def check(
    schedule: PipelineSchedule,
    *,
    skips: Sequence[tuple[int, int]] = (),
    rendezvous: bool = False,
    costs: PipelineCosts | None = None,
    budget_bytes: int | None = None,
) -> None:
    """Raise `ScheduleError` with rank, action and micro-batch of everything that would stop the schedule.

    Messages of a pair of ranks are matched in order, as by NCCL and by gloo without tags; skip connections have a
    channel of their own for each pair of stages. `skips` are such pairs (`costs.skips` where costs are given). With
    `rendezvous` sends wait for their receives, see `replay`. With costs and a budget the bytes of each rank are held
    against it.
    """
    found = problems(schedule, skips=skips, rendezvous=rendezvous, costs=costs, budget_bytes=budget_bytes)
    if found:
        raise broken(schedule, found)


def problems(
    schedule: PipelineSchedule,
    *,
    skips: Sequence[tuple[int, int]] = (),
    rendezvous: bool = False,
    costs: PipelineCosts | None = None,
    budget_bytes: int | None = None,
) -> list[str]:
    """Return what would stop the schedule, a line each; see `check`."""
    if costs is not None:
        if len(costs.stages) != schedule.stages:
            raise other_stages(schedule, len(costs.stages))
        skips = costs.skips
    found = [*_counted(schedule)]
    if schedule.has_transfers:
        found += _unmatched(schedule, neighbours(schedule.stages, skips))
    if not found:  # else the replay would say again what is missing
        found += wait_problems(schedule, replay(schedule, skips, rendezvous=rendezvous).waits)
    if costs is not None and budget_bytes is not None and not found:
        found += _over_budget(schedule, costs, budget_bytes)
    return found


def _counted(schedule: PipelineSchedule) -> Iterator[str]:
    """Yield actions that run on a foreign rank, more than once, or not at all."""
    times: Counter[Action] = Counter()
    for rank, row in enumerate(schedule.actions):
        times.update(row)
        for action in row:
            if schedule.rank_of[action.stage] != rank:
                yield (
                    f"rank {rank} runs {action} ({action.words}), but stage {action.stage} is on rank "
                    f"{schedule.rank_of[action.stage]}"
                )
    for action, count in times.items():
        if count > 1:
            yield f"rank {schedule.rank_of[action.stage]} runs {action} ({action.words}) {count} times"
    for stage, rank in enumerate(schedule.rank_of):
        for microbatch in range(schedule.microbatches):
            yield from _incomplete(times, rank, stage, microbatch)


def _incomplete(times: Counter[Action], rank: int, stage: int, microbatch: int) -> Iterator[str]:
    """Yield what is wrong with the computations of one stage on one micro-batch: F with B, or F with I and W."""
    full, halves = Action(stage, "B", microbatch), [Action(stage, kind, microbatch) for kind in _HALVES]
    if full in times and any(half in times for half in halves):
        extra = next(half for half in halves if half in times)
        yield f"rank {rank} runs both {full} and {extra} ({extra.words}), which is a part of it"
        return
    wanted = [Action(stage, "F", microbatch)]
    wanted += halves if any(half in times for half in halves) else [full]
    for action in wanted:
        if action not in times:
            yield f"rank {rank} never runs {action} ({action.words})"


_HALVES: tuple[Kind, ...] = ("I", "W")


Message = tuple[Action, Action]
"""A send and its receive."""

Channel = tuple[int, int, tuple[int, int]]
"""Ranks from and to, and the two stages of a skip connection; (0, 0) for all messages to the next or last stage."""


def _unmatched(schedule: PipelineSchedule, near: Neighbours) -> Iterator[str]:
    """Yield sends without receive, receives without send, and orders that differ, channel by channel."""
    sent: dict[Channel, list[Message]] = defaultdict(list)
    received: dict[Channel, list[Message]] = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in COMPUTE:
                continue
            side = sent if action.kind.startswith("SEND") else received
            channels = [(_channel(schedule, *message), message) for message in _messages(action, near)]
            remote = [(channel, message) for channel, message in channels if channel[0] != channel[1]]
            if not remote:
                yield f"rank {rank} has {action} ({action.words}), but there is no stage on another rank to do it with"
            for channel, message in remote:
                side[channel].append(message)
    for channel in sorted({*sent, *received}):
        yield from _differing(channel, sent[channel], received[channel])


def _channel(schedule: PipelineSchedule, send: Action, receive: Action) -> Channel:
    """Return the channel of a message."""
    skip = abs(send.stage - receive.stage) > 1
    stages = (send.stage, receive.stage) if skip else (0, 0)
    return schedule.rank_of[send.stage], schedule.rank_of[receive.stage], stages


def _messages(action: Action, near: Neighbours) -> Iterator[Message]:
    """Yield (send, receive) of every message that a transfer stands for."""
    stage, kind, microbatch = action
    send: Kind
    receive: Kind
    send, receive = ("SEND_F", "RECV_F") if kind.endswith("F") else ("SEND_B", "RECV_B")
    others = (near.targets if kind in ("SEND_F", "RECV_B") else near.sources)[stage]
    for other in others:
        source, target = (stage, other) if kind == send else (other, stage)
        yield Action(source, send, microbatch), Action(target, receive, microbatch)


def _differing(channel: Channel, sent: Sequence[Message], received: Sequence[Message]) -> Iterator[str]:
    """Yield the messages of a channel that only one side knows, or else the first that is out of order."""
    source, target, _ = channel
    for send, receive in _only_in(sent, received):
        yield f"rank {target} never receives {receive} ({receive.words}), which rank {source} sends by {send}"
    for send, receive in _only_in(received, sent):
        yield f"rank {source} never sends {send} ({send.words}), which rank {target} receives by {receive}"
    if set(sent) != set(received):
        return
    pairs = enumerate(zip(sent, received, strict=False))
    number, theirs, ours = next(((i, a, b) for i, (a, b) in pairs if a != b), (0, None, None))
    if theirs is not None and ours is not None:
        yield (
            f"message {number} from rank {source} to rank {target} is {theirs[0]} where it is sent, but {ours[1]} "
            f"({ours[1].words}) where it is received"
        )


def _only_in(some: Iterable[Message], others: Iterable[Message]) -> Iterator[Message]:
    known = set(others)
    return (each for each in some if each not in known)


_LESS_MEMORY = (
    "fewer micro-batches in flight (--fix schedule=1f1b), smaller ones (--fix microbatch=N) or recomputation "
    "(--fix recompute=full) need less"
)


def _over_budget(schedule: PipelineSchedule, costs: PipelineCosts, budget_bytes: int) -> Iterator[str]:
    """Yield the first action of each rank that takes it over the budget, with the rank's peak."""
    for rank, row in enumerate(schedule.compute_only().actions):
        held = static_bytes(costs, schedule.rank_of, rank)
        during = [each for each, _ in levels(costs, held, row)]
        peak = max((held, *during))
        if peak <= budget_bytes:
            continue
        if held > budget_bytes:
            where = "before its first action"
        else:
            first = next(action for action, each in zip(row, during, strict=True) if each > budget_bytes)
            where = f"from {first} ({first.words}) on"
        yield (
            f"rank {rank} exceeds its memory {where}: its peak is {format_bytes(peak)}, of which "
            f"{format_bytes(held)} stay all the time, and the budget is {format_bytes(budget_bytes)}; {_LESS_MEMORY}"
        )
